"""Buffers' transforms, rollouts of a model, tokenized data, KL controllers."""

from __future__ import annotations

import torch
from _shared import model, show, tokenizer
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import (
    AdaptiveKLController,
    ConstantKLController,
    History,
    PairwiseDataset,
    PromptData,
    RewardData,
    RolloutFromModel,
    TensorDictTokenizer,
    TopKRewardSelector,
    create_infinite_iterator,
)
from torchrl.data.llm.prompt import PromptTensorDictTokenizer


def turn(prompt, reward, done=True):
    return TensorDict(
        {
            ("text", "prompt"): prompt,
            ("next", "reward"): torch.full((1, 1), float(reward)),
            ("next", "done"): torch.tensor([done]),
        },
        batch_size=[],
    )


def trajectories(*rewards):
    return lazy_stack([lazy_stack([turn("p", reward)]) for reward in rewards])


def the_best_of_a_prompt():
    buffer = ReplayBuffer(storage=LazyStackStorage(50), batch_size=4)
    buffer.append_transform(TopKRewardSelector(total_dialog_turns=5, topk_size=2, verbose=False))
    for reward in (1, 5, 2, 4, 3):
        buffer.extend(trajectories(reward))
    show(len(buffer), sorted(buffer[:]["next", "reward"].flatten().tolist()))


def the_best_of_equal_rewards():
    buffer = ReplayBuffer(storage=LazyStackStorage(50), batch_size=4)
    buffer.append_transform(TopKRewardSelector(total_dialog_turns=3, topk_size=2, verbose=False))
    for reward in (1, 1, 1):
        buffer.extend(trajectories(reward))
    show(len(buffer))


def fewer_turns_than_asked_for():
    buffer = ReplayBuffer(storage=LazyStackStorage(50), batch_size=4)
    buffer.append_transform(TopKRewardSelector(total_dialog_turns=5, topk_size=2, verbose=False))
    buffer.extend(trajectories(1))
    show(len(buffer))


def keys_of_a_topk_selector():
    chosen = TopKRewardSelector(total_dialog_turns=5, topk_size=2)
    show(chosen.prompt_key, chosen.rewards_key, chosen.done_key, chosen.topk_size)


def a_constant_controller():
    control = ConstantKLController(kl_coef=0.3)
    control.update([1.0, 2.0])
    show(control.coef)


def a_constant_controller_of_a_model():
    module = torch.nn.Module()
    module.kl_coef = 0.0
    control = ConstantKLController(kl_coef=0.3, model=module)
    show(control.coef, module.kl_coef)


def an_adaptive_controller():
    control = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=100)
    for values in ([1.0, 3.0], [20.0, 30.0]):
        control.update(values)
        show(control.coef)


def an_adaptive_controller_of_a_model():
    module = torch.nn.Module()
    module.kl_coef = 0.0
    control = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=100, model=module)
    control.update([9.0])
    show(control.coef, module.kl_coef)


def the_tokenizer_of_tensordicts():
    process = TensorDictTokenizer(tokenizer(), max_length=8, key="text")
    out = process({"text": ["hello", "what is 2+2?"]})
    show(out.batch_size, sorted(out.keys()), out["input_ids"], out["attention_mask"].sum(-1))


def the_tokenizer_as_a_dict():
    process = TensorDictTokenizer(tokenizer(), max_length=6, return_tensordict=False)
    out = process({"text": ["hello"]})
    show(type(out).__name__, sorted(out.keys()))


def the_tokenizer_of_prompts():
    process = PromptTensorDictTokenizer(tokenizer(), max_length=24)
    out = process({"prompt": ["what is 2+2?"], "label": ["4"]})
    show(out.batch_size, sorted(out.keys()), out["prompt_rindex"])


def data():
    ids = torch.tensor([[0, 0, 5, 6], [0, 7, 8, 9]])
    return PromptData(
        input_ids=ids,
        attention_mask=(ids > 0).long(),
        prompt_rindex=torch.tensor([3, 3]),
        labels=ids,
        batch_size=[2],
    )


def reward_data_of_pairs():
    ids = torch.tensor([[1, 2], [3, 4]])
    one = RewardData(input_ids=ids, attention_mask=torch.ones_like(ids), batch_size=[2])
    pairs = PairwiseDataset(chosen_data=one, rejected_data=one.clone(), batch_size=[2])
    show(pairs.batch_size, pairs[1].chosen_data.input_ids, pairs.rejected_data.rewards)


def an_endless_iterator():
    endless = create_infinite_iterator([1, 2])
    show([next(endless) for _ in range(5)])


def rollout():
    return RolloutFromModel(model(), model(), model(), kl_coef=0.1, max_new_tokens=4)


def a_rollouts_generated_shape():
    ids = tokenizer()(["what is 2+2?"], return_tensors="pt")
    batch = PromptData(
        input_ids=ids.input_ids,
        attention_mask=ids.attention_mask,
        prompt_rindex=torch.tensor([ids.input_ids.shape[1] - 1]),
        batch_size=[1],
    )
    made, log_probs, ratio = rollout().generate(batch)
    show(made.shape, log_probs.shape, ratio.shape)


def a_rollouts_scores_and_its_padding():
    made = RolloutFromModel.logprobs_of_labels(
        torch.arange(12.0).view(1, 3, 4), torch.tensor([[0, 3, 1]])
    )
    show(made)


def a_rollouts_schedule():
    made = rollout()
    made.step_scheduler()
    show(made.kl_coef)


def a_prioritized_buffer():
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(10))


def histories_in_a_replay_buffer():
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    chats = [[{"role": "user", "content": str(i)}] * (i + 1) for i in range(3)]
    buffer.extend(lazy_stack([TensorDict(h=History.from_chats(chat)) for chat in chats]))
    show(buffer[:]["h"].content, buffer[1]["h"].shape)


PROGRAMS = {
    "a_topk_that_is_larger_than_the_turns": lambda: TopKRewardSelector(
        total_dialog_turns=2, topk_size=3
    ),
    "an_adaptive_controller_without_values": lambda: AdaptiveKLController(
        init_kl_coef=0.1, target=6.0, horizon=100
    ).update([]),
    "prompt_data_and_its_index": lambda: show(
        data().batch_size, data()[0].input_ids, data().prompt_rindex, data().logits
    ),
    "prompt_data_that_masks_its_labels": lambda: show(data().mask_label().labels),
}
"""Programs of one expression."""
