"""What the tests of weights share."""

from __future__ import annotations

import pytest
from weights.processes import Child


@pytest.fixture
def children():
    started = []

    def start(make, *arguments):
        started.append(Child(make, *arguments))
        return started[-1]

    yield start
    for child in started:
        child.kill()
