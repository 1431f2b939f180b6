"""The channel between threads keeps the contract of channels."""

from __future__ import annotations

import pytest
from conformance.channels import ChannelConformance

from torchrl_llm.collectors.transport import LocalChannel
from torchrl_llm.errors import ConfigError


class TestLocalChannel(ChannelConformance):
    @pytest.fixture
    def channel_factory(self):
        return LocalChannel


def test_a_channel_without_room_is_refused():
    with pytest.raises(ConfigError, match="max_size"):
        LocalChannel(0)
