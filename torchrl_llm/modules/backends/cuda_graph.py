"""CUDA graph of a function of tensors at fixed addresses.

Replaying a graph costs one launch. Without a graph, Python launches each kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

Step = Callable[[], Tensor]

# torch allows one recording at a time in a process.
_RECORDING = threading.Lock()


class GraphRecorder:
    """Records functions as CUDA graphs, for one thread and one active graph at a time.

    During a recording (some 20 ms), no other thread may wait for the whole device
    (``torch.cuda.synchronize``). At its start (some 0.1 ms), no other thread may draw from the
    device's own generator (dropout). Both raise an error in the other thread.

    Args:
        device: a CUDA device with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # torch cannot reuse a pool after its last graph is freed, and memory would pile up in new
        # pools. This graph stays alive, so that each recording reuses the memory of the previous
        # one.
        self._anchor, _ = self._record(lambda: torch.zeros((), device=device))

    def __call__(self, step: Step) -> Step:
        """Run a function once, record it, and return a function that replays it.

        Args:
            step: function on tensors at fixed addresses. It must return the same result if it runs
                twice, and must neither wait for the device nor draw random numbers.

        Returns:
            A function that replays the graph on the current stream. Each call overwrites and
            returns the same tensor.

        Raises:
            RuntimeError: when CUDA cannot record the function; the device stays usable.
        """
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                step()  # libraries allocate and choose kernels at a first call
            graph, result = self._record(step)
        finally:
            outside.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _record(self, step: Step) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # torch.cuda.graph is not used, because it empties the allocator's cache first and keeps its
        # stream current after an error.
        graph = torch.cuda.CUDAGraph()
        with _RECORDING, torch.cuda.stream(self._stream):
            try:
                self._begin(graph)
                result = step()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph, result

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        # A recording takes over the state of the device's generator. Draws of other threads would
        # fail during the recording, and all draws would fail after a failed recording. So the
        # recording gets its own generator.
        generator = torch.cuda.default_generators[self._device.index]
        state = generator.graphsafe_get_state()
        generator.graphsafe_set_state(torch.Generator(self._device))
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        finally:
            generator.graphsafe_set_state(state)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        # End the recording of a failed function; this raises an error if CUDA has already ended it.
        with suppress(RuntimeError):
            graph.capture_end()
        # Without this call, the allocator assumes that the recording continues and frees no memory.
        # The call raises an error if the line above has already done it.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
