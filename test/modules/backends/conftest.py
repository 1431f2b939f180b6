"""Fake servers for the tests of this folder."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from modules.backends.openai_server import FakeServer


@pytest.fixture
def serve():
    """Start fake servers that end with the test; a call returns one and its address."""
    with ExitStack() as running:

        def start(**options):
            fake = FakeServer(**options)
            return fake, running.enter_context(fake.running())

        yield start
