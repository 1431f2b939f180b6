from torchrl_llm.evaluation.conversation import Conversation as Conversation
from torchrl_llm.evaluation.evaluate import (
    Evaluation as Evaluation,
    Outcome as Outcome,
    answer_record as answer_record,
    evaluate as evaluate,
    pass_at_k as pass_at_k,
)
from torchrl_llm.evaluation.held_out_loss import (
    HeldOutLoss as HeldOutLoss,
    held_out_loss as held_out_loss,
)
from torchrl_llm.evaluation.repeats import (
    answer_vote as answer_vote,
    figures_at_k as figures_at_k,
    majority_at_k as majority_at_k,
    sample_sizes as sample_sizes,
)
