"""Several turns: the environment's own loop asks three times, then scores."""

import verifiers.v1 as vf

__all__ = ["Game", "GameTaskset"]


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()
    with_other: bool = False


class GameTaskset(vf.Taskset[vf.Task[vf.TaskData, vf.State, vf.TaskConfig], vf.TasksetConfig]):
    def load(self):
        for n in range(4):
            yield vf.Task(vf.TaskData(prompt=f"What is {n}+1?"), self.config.task)


class Game(vf.Env[GameConfig]):
    async def run(self, task, agents):
        if self.config.with_other:
            await agents.other.run(task)
        async with agents.player.interaction(task) as talk:
            said = [await talk.turn()]
            for number in (1, 2):
                said.append(await talk.turn(f"What is {number}+2?"))
        talk.trace.record_reward("turns", float(len(said)), 1.0)
