"""CUDA graph of a function of tensors that stay where they are.

Replaying a graph costs one launch, where the function would launch each of its kernels from Python.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

Step = Callable[[], Tensor]

# torch allows one recording at a time in a process.
_RECORDING = threading.Lock()


class GraphRecorder:
    """Records functions as CUDA graphs, for one thread at a time and one graph in use at a time.

    While it records (some 20 ms), no other thread may wait for the whole device
    (``torch.cuda.synchronize``): CUDA makes that an error in both threads.

    Args:
        device: a CUDA device with an index.

    Attributes:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # torch cannot reuse a pool whose graphs have all gone, and memory would pile up in new
        # pools. This graph stays, so that each recording gets the memory of the one before it.
        self._anchor, _ = self._record(lambda: torch.zeros((), device=device))

    def __call__(self, step: Step) -> Step:
        """Run a function once, record it, and return what replays it.

        Args:
            step: runs on tensors at fixed addresses, may be run twice for the same result, and
                neither waits for the device nor draws random numbers.

        Returns:
            Replays on the current stream; its result is the same tensor, overwritten, each time.

        Raises:
            RuntimeError: when CUDA cannot record the function; the device is fit for work then.
        """
        outside = torch.cuda.current_stream(self.device)
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
        # torch.cuda.graph would empty the allocator's cache first, and leave its stream current
        # after an error.
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        with _RECORDING, torch.cuda.stream(self._stream):
            gc.disable()  # to free a forgotten graph while another is recorded ends the process
            try:
                self._begin(graph)
                try:
                    result = step()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph)
                    raise
            finally:
                if collects:
                    gc.enable()
        return graph, result

    def _begin(self, graph: torch.cuda.CUDAGraph) -> None:
        # A recording takes the state of the device's generator for itself: draws of other threads
        # would fail meanwhile, and all draws after a recording that has failed. It gets another.
        generator = torch.cuda.default_generators[self.device.index]
        state = generator.graphsafe_get_state()
        generator.graphsafe_set_state(torch.Generator(self.device))
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        finally:
            generator.graphsafe_set_state(state)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        # Ends the recording of a function that has failed; fails itself where CUDA gave it up.
        with suppress(RuntimeError):
            graph.capture_end()
        # Without this the allocator thinks that it goes on, and gives no memory back; an error when
        # the line above has done it.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
