"""A tool that does what the call says, where the processes of a test can import it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchrl_llm.tools.tool import Tool
from torchrl_llm.tools.tool_call import ToolOutput


class Worker(Tool):
    """Does what the call says."""

    name = "work"
    parameters = {"type": "object"}  # noqa: RUF012

    def run(self, call):
        do, value = call.args["do"], call.args.get("value")
        if do == "spin":
            while True:
                pass
        if do == "sleep_child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(value).write_text(str(child.pid))
            time.sleep(600)
        if do == "die":
            os._exit(value)
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "raise":
            raise ValueError(value)
        if do == "exit":
            sys.exit(value)
        if do == "big":
            return "x" * value
        if do == "output":
            return ToolOutput("out", "Odd", 3, True)
        return os.getpid() if do == "pid" else value


class Stateful(Worker):
    stateful = True
