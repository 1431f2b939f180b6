"""Tools: a calculator that runs in a process of its own, and a reward for its result."""

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Desk(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Computes an arithmetic expression exactly."""
        first, _, second = expression.partition("*")
        return str(int(first) * int(second))


class ToolData(vf.TaskData):
    answer: str


class ToolTask(vf.Task[ToolData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def computed(self, trace) -> float:
        said = [each.content for each in trace.branches[-1].messages if each.role == "tool"]
        return float(self.data.answer in said)


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config):
        return [Desk(vf.SharedToolsetConfig())]

    def load(self):
        n = 100
        while True:
            n += 1
            prompt = f"What is {n}*28?"
            data = ToolData(prompt=prompt, system_prompt="Use the calculator.", answer=str(28 * n))
            yield ToolTask(data, self.config.task)


if __name__ == "__main__":
    Desk.run()
