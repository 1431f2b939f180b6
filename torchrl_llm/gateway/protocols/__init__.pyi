from torchrl_llm.gateway.protocols.chat_completions import ChatCompletions as ChatCompletions
from torchrl_llm.gateway.protocols.protocol import Protocol as Protocol
