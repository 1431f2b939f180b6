from torchrl_llm.gateway.protocols.anthropic import AnthropicMessages as AnthropicMessages
from torchrl_llm.gateway.protocols.chat_completions import ChatCompletions as ChatCompletions
from torchrl_llm.gateway.protocols.completions import Completions as Completions
from torchrl_llm.gateway.protocols.protocol import Protocol as Protocol
from torchrl_llm.gateway.protocols.responses import Responses as Responses
