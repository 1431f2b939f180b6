"""What the tests of collectors share."""

from __future__ import annotations

import pytest
from collectors.collecting import make_policy


@pytest.fixture
def policy(tokenizer):
    return make_policy(tokenizer)
