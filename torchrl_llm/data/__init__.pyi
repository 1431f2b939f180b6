from torchrl_llm.compat.buffer_dataset import TorchRLBufferDataset as TorchRLBufferDataset
from torchrl_llm.compat.topk_selector import TopKRewardSelector as TopKRewardSelector
from torchrl_llm.compat.torchrl_classes import (
    PairwiseDataset as PairwiseDataset,
    PromptData as PromptData,
    PromptTensorDictTokenizer as PromptTensorDictTokenizer,
    RewardData as RewardData,
    RolloutFromModel as RolloutFromModel,
    TensorDictTokenizer as TensorDictTokenizer,
    TokenizedDatasetLoader as TokenizedDatasetLoader,
    create_infinite_iterator as create_infinite_iterator,
    get_dataloader as get_dataloader,
)
from torchrl_llm.data.chat import Chat as Chat
from torchrl_llm.data.column import Column as Column
from torchrl_llm.data.views import (
    ChatHistory as ChatHistory,
    LogProbs as LogProbs,
    Masks as Masks,
    Text as Text,
    Tokens as Tokens,
    TokenSupport as TokenSupport,
    TokenTrace as TokenTrace,
)
from torchrl_llm.data.enums import (
    FinishReason as FinishReason,
    MaskReason as MaskReason,
    Source as Source,
    TruncationReason as TruncationReason,
)
from torchrl_llm.data.history import (
    ContentBase as ContentBase,
    History as History,
    add_chat_template as add_chat_template,
    remove_chat_template as remove_chat_template,
)
from torchrl_llm.data.kl_controllers import (
    AdaptiveKLController as AdaptiveKLController,
    ConstantKLController as ConstantKLController,
    KLController as KLController,
)
from torchrl_llm.data.record import TokenRecord as TokenRecord
from torchrl_llm.data.replay_buffers.group_sampler import PromptGroupSampler as PromptGroupSampler
from torchrl_llm.data.rollout_store import (
    RolloutStore as RolloutStore,
    RolloutWriter as RolloutWriter,
)
from torchrl_llm.data.scoring import (
    HeadStates as HeadStates,
    ScoreExtras as ScoreExtras,
    Support as Support,
    TokenScorer as TokenScorer,
    TokenScores as TokenScores,
)
from torchrl_llm.data.token_facts import (
    TokenFact as TokenFact,
    register_fact as register_fact,
    unregister_fact as unregister_fact,
)
