"""Importing this makes a process of tests quicker, without a change in what it computes.

PyYAML reads with its parser in C, wherever it was built with it: Hydra and OmegaConf, which name
the slow one, take most of the time of a short run to read files. Nothing waits for the disk: tests
kill processes and never the machine, and what was handed to the kernel outlives a process.
"""

from __future__ import annotations

import os

import yaml

yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
os.fsync = lambda handle: None
