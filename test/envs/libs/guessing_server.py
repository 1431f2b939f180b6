"""A server of openenv-core with a guessing game, run by an interpreter that has the package.

python guessing_server.py PORT [NUM_SESSIONS]
"""

from __future__ import annotations

import os
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess."""

    guess: int


class Hint(Observation):
    """What is told."""

    hint: str


class Guessing(Environment):
    """Guess a number that the seed says; some numbers are worse than wrong."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed=None, episode_id=None, **options):
        """Begin."""
        self._state = State(episode_id=episode_id)
        self._number = (seed or 0) % 10
        return Hint(hint="Guess a number from 0 to 9.", done=False, reward=None)

    def step(self, action, **options):
        """Compare."""
        self._state.step_count += 1
        if action.guess == 13:
            raise RuntimeError("thirteen!")
        if action.guess == 99:
            time.sleep(5)
        if action.guess == 666:
            os._exit(1)
        right = action.guess == self._number
        hint = "Right." if right else "Higher." if action.guess < self._number else "Lower."
        return Hint(hint=hint, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        """The state."""
        return self._state


if __name__ == "__main__":
    sessions = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
