"""Games that someone plays, as conversations: the same as those that the environment writes."""

from __future__ import annotations

import pytest

from torchrl_llm.data.history import History
from torchrl_llm.envs.games import KeyDoorEnv, TicTacToeEnv, expert, random_player


@pytest.mark.parametrize("actions", ["tag", "bare", "call"])
@pytest.mark.parametrize(
    ("env_class", "options"), [(TicTacToeEnv, {}), (KeyDoorEnv, {"size": 3, "slack": 1.0})]
)
def test_the_environment_writes_the_same_conversation(env_class, options, actions):
    env = env_class(num_envs=3, shuffle=False, actions=actions, **options)
    td = env.reset()
    # As many turns as its longest game; a game that has ended waits.
    wanted = [env.demonstrate(expert(0), seed) for seed in td["seed"]]
    for turn in range(max(len(chat) for chat in wanted)):
        prompts = td["history"].prompt.chats
        at = [len(prompt) for prompt in prompts]
        for prompt, chat in zip(prompts, wanted, strict=True):
            seen = [dict(message) for message in prompt]
            assert seen[: len(chat)] == chat[: len(seen)], turn
        answers = [
            chat[n] if n < len(chat) else chat[-1] for n, chat in zip(at, wanted, strict=True)
        ]
        full = [prompt + [answer] for prompt, answer in zip(prompts, answers, strict=True)]
        td["history"].full = History.of(full)
        td = env.step(td)
        assert td["next", "game_legal"].all()
        if td["next", "done"].all():
            break
        td = env.step_mdp(td).set("_step", ~td["next", "done"].squeeze(-1))
    assert td["next", "done"].all()


def test_without_a_system_prompt_a_game_begins_with_what_the_player_sees():
    env = TicTacToeEnv(num_envs=1, player="X", system_prompt="Play.")
    assert env.demonstrate(random_player(0), 3)[0] == {"role": "system", "content": "Play."}
