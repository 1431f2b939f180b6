"""Process in a sandbox with its output pipes: started, watched, and ended with all it started."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence

from torchrl_llm.sandbox.cgroups import control_group
from torchrl_llm.sandbox.interface import Limits
from torchrl_llm.sandbox.process_watch import Capture, Tree

GRACE_S = 1.5
"""How long a killed process may take to be gone."""


class Contained:
    """A process in a sandbox with its output pipes; a context that leaves nothing of it.

    Args:
        argv: the whole command line, sandbox included.
        limits: of the run.
        env: its environment, complete.
        cwd: where it starts.
        stdin: descriptor for its standard input; ``None`` for ``/dev/null``.
        pass_fds: further descriptors that it gets.

    Raises:
        OSError: the program that makes the sandbox cannot be started.
        ValueError: ``argv`` cannot be handed to any program.

    Attributes:
        overhead: processes of the sandbox itself.
        grouped: whether its memory is to be counted by a control group, where one can be made.
    """

    overhead = 0
    grouped = True

    def __init__(
        self,
        argv: Sequence[str],
        *,
        limits: Limits,
        env: Mapping[str, str],
        cwd: str = "/",
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        group = None
        if self.grouped:
            group = control_group(limits.memory_bytes, limits.file_bytes)
        self.group = group
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        self.stdout = Capture(out_r, limits.output_bytes)
        self.stderr = Capture(err_r, limits.output_bytes)
        try:
            self.process = subprocess.Popen(
                argv if group is None else [*group.argv, *argv],
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=out_w,
                stderr=err_w,
                env=dict(env),
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except BaseException:
            self.close_pipes()
            if group is not None:
                group.close()
            raise
        finally:
            os.close(out_w)
            os.close(err_w)
        self.tree = Tree(self.process.pid, limits, overhead=self.overhead, group=group)

    @property
    def outputs(self) -> tuple[Capture, ...]:
        """Every pipe that must be read while it runs."""
        return (self.stdout, self.stderr)

    def interrupt(self) -> None:
        """Have it end soon; another thread that watches it sees that."""
        self.process.terminate()

    def kill(self) -> None:
        """End it and all that it started; waits until they are gone."""
        self.process.kill()
        self.wait()

    def wait(self) -> None:
        """Wait for the process itself for a short while."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)

    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; ``None`` where the sandbox failed to run it."""
        return self.process.returncode

    @property
    def out_of_memory(self) -> bool:
        """Whether memory has ended it or a process of it."""
        return self.group is not None and self.group.exceeded

    def close_pipes(self) -> None:
        """Close the reading ends."""
        for output in self.outputs:
            output.close()

    def close(self) -> None:
        """Leave nothing of it; may be called twice."""
        self.kill()
        self.close_pipes()
        if self.group is not None:
            self.group.close()

    def __enter__(self) -> Contained:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
