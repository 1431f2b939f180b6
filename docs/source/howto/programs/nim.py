import random

from torchrl_llm.envs import ActionError, Observed, Session


class Nim(Session):
    """Take 1, 2 or 3 sticks in turn; whoever takes the last one wins."""

    instructions = "Take 1, 2 or 3 sticks in turn. Whoever takes the last one wins."
    action_help = "1, 2 or 3"

    def reset(self, options):
        self.random = random.Random(options["seed"])
        self.sticks = self.random.randint(5, 12)
        return f"{self.sticks} sticks."

    def step(self, action):
        if action not in ("1", "2", "3"):
            raise ActionError(f"{action} is not a move.")
        self.sticks -= int(action)
        if self.sticks <= 0:
            return Observed("You win.", 1.0, terminated=True, success=True)
        self.sticks -= self.random.randint(1, 3)
        if self.sticks <= 0:
            return Observed("You lose.", terminated=True)
        return f"{self.sticks} sticks."
