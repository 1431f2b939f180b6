from torchrl.data.llm.dataset import (
    TensorDictTokenizer as TensorDictTokenizer,
    TokenizedDatasetLoader as TokenizedDatasetLoader,
    create_infinite_iterator as create_infinite_iterator,
    get_dataloader as get_dataloader,
)
from torchrl.data.llm.prompt import (
    PromptData as PromptData,
    PromptTensorDictTokenizer as PromptTensorDictTokenizer,
)
from torchrl.data.llm.reward import (
    PairwiseDataset as PairwiseDataset,
    RewardData as RewardData,
    pre_tokenization_hook as pre_tokenization_hook,
)
from torchrl.data.llm.utils import RolloutFromModel as RolloutFromModel

PROMPT_DATASET: str
PAIR_DATASET: str
