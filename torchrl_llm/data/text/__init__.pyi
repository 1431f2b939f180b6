from torchrl_llm.data.text.continuation import (
    Extension as Extension,
    ForkCause as ForkCause,
    OnRewrite as OnRewrite,
)
from torchrl_llm.data.text.formatter import (
    ChatFormatter as ChatFormatter,
    Encoded as Encoded,
    assistant_mask as assistant_mask,
)
