"""Single turn: a sum, two rewards of which one counts half, and a metric."""

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float((trace.last_reply or "").endswith(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply or "") < 10)

    @vf.metric
    async def length(self, trace) -> float:
        if self.data.answer == "unknown":
            raise ValueError("this one cannot be measured")
        return float(len(trace.last_reply or ""))


class SumConfig(vf.TasksetConfig):
    first: int = 10
    number: int = 20


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.first, self.config.first + self.config.number):
            answer = "unknown" if self.config.first == 0 else str(2 * n)
            yield SumTask(SumData(prompt=f"What is {n}+{n}?", answer=answer), self.config.task)
