"""What runs in the processes of Ray while its channel is tested: importable there by name."""

from conformance.channels import PATIENCE_S, delivery

from torchrl_llm.collectors.transport import ray_channel as ray_transport


class ResettableServer(ray_transport._Server):
    """A server that can be emptied: to start an actor takes seconds."""

    async def reset(self, max_size):
        self.__init__(max_size)


def write(channel, worker, number):
    for i in range(number):
        channel.put(delivery(worker, i, values=(i,), sent=i + 1), timeout_s=PATIENCE_S)
    return number
