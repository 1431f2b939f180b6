"""The channel between threads keeps the contract of channels."""

import pytest
from conformance.channels import ChannelConformance

from torchrl_llm.collectors.transport import LocalChannel


class TestLocalChannel(ChannelConformance):
    @pytest.fixture
    def channel_factory(self):
        return LocalChannel
