"""Processes of tests, forked from a server that has imported what they need and has run no test.

A fork of the process that runs the tests may hang: whatever its threads held stays locked.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

# What a run imports, some of it in its course only.
IMPORTED = (
    "quick_yaml",
    "recipes.kill_helper",
    "matplotlib.pyplot",
    "transformers.models.qwen2.modeling_qwen2",
)


def fork_server():
    """The context of the one server of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    here = Path(__file__).parent  # where the server finds what it is to import
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        forkserver.ensure_running()
    return context
