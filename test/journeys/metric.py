"""Compares a metric of a run with a number: ``metric.py FOLDER eval/accuracy last '>=' 0.9``.

``first`` and ``last`` are its first and last values, ``count`` is how many there are.
"""

from __future__ import annotations

import csv
import operator
import sys
from pathlib import Path

COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt}

folder, name, which, sign, number = sys.argv[1:]
with (Path(folder) / "metrics.csv").open(newline="") as file:
    values = [float(row[name]) for row in csv.DictReader(file) if row.get(name)]
value = {"first": values[:1], "last": values[-1:], "count": [len(values)]}[which][0]
print(f"{name} {which} {value}")
if not COMPARE[sign](value, float(number)):
    sys.exit(f"{name} {which} is {value}, expected {sign} {number}")
