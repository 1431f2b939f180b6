"""Rewards: what parsers say of answers that stand in rows, and how rewards of a step add up."""

from __future__ import annotations

import importlib.util
import sys
import types

import torch
from _shared import show, tokenizer
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.data.llm import History
from torchrl.envs import StepCounter
from torchrl.envs.llm import (
    AddThinkingPrompt,
    ChatEnv,
    CountdownRewardParser,
    DatasetChatEnv,
    GSM8KRewardParser,
    IFEvalScoreData,
    IfEvalScorer,
    MATHRewardParser,
)

if "torchrl_llm" not in IfEvalScorer.__module__:
    # TorchRL's scorer asks for packages that the instructions below do not use.
    for name in ("nltk", "immutabledict"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].immutabledict = dict
            setattr(sys.modules[IfEvalScorer.__module__], f"_has_{name}", True)

GSM = [("What is 2+3?", "so it is #### 5")]
KEYS = ("reward", "reward_answer", "reward_think", "reward_right", "success")


def scored(parsers, replies, rows=GSM, **kwargs):
    """The step in which the model said ``replies``, one a row, to the questions of ``rows``."""
    num = len(replies)
    env = ChatEnv(batch_size=(num,), tokenizer=tokenizer(), **kwargs)
    for parser in parsers if isinstance(parsers, list) else [parsers]:
        env = env.append_transform(parser)
    rows = list(rows) * (num // len(rows))
    given = TensorDict(
        query=[row[0] for row in rows], answer=[row[1] for row in rows], batch_size=(num,)
    )
    td = env.reset(given)
    chats = [[{"role": "assistant", "content": reply}] for reply in replies]
    td["history"].full = td["history"].prompt.extend(
        History.from_chats(chats), inplace=False, dim=-1
    )
    td["next", "answer"] = td["answer"]
    return env.step(td)["next"]


def show_reward(td):
    for key in KEYS:
        value = td[key]
        show((key, value.shape, value.flatten().tolist()))
    show(td["done"].flatten(), td["terminated"].flatten())


# -- GSM8K ----------------------------------------------------------------------------------------


def answers_of_several_rows():
    replies = ["<answer>5</answer>", "<answer>4</answer>", "five", "<think>a</think>"]
    show_reward(scored(GSM8KRewardParser(tokenizer()), replies))


def an_answer_with_signs():
    replies = [f"<answer>{text}</answer>" for text in ("$5", "5.0", " 5 ", "5.", "5,0", "")]
    show(scored(GSM8KRewardParser(), replies)["success"].flatten())


def an_answer_among_the_thoughts():
    reply = "<think><answer>4</answer> no</think><answer>5</answer>"
    show(scored(GSM8KRewardParser(), [reply])["success"])


def an_answer_without_a_word():
    td = scored(GSM8KRewardParser(), ["<answer></answer>"])
    show(td["reward"], td["done"])


def other_values_of_right_and_form():
    parser = GSM8KRewardParser(format_reward=0.5, correct_reward=2.0)
    show(scored(parser, ["<answer>5</answer>", "<answer>6</answer>", "none"])["reward"])


def an_answer_does_not_end_the_episode():
    td = scored(GSM8KRewardParser(set_done_if_answer=False), ["<answer>5</answer>"])
    show(td["reward"], td["done"], td["terminated"])


def attributes_of_a_parser():
    parser = GSM8KRewardParser(tokenizer(), format_reward=0.2)
    show(parser.out_keys, parser.eos_token, parser.set_done_if_answer)
    show(parser.format_reward, parser.correct_reward, parser.tokenizer is tokenizer())


def normalized_answers():
    for text in ("$1,234.50", " 7 ", "12%", "3.0", "0.50."):
        show(GSM8KRewardParser.normalize_answer(text))


def tags_of_a_text():
    for text in ("<think>a</think><answer> b </answer>", "nothing", "<answer>1</answer>"):
        show(GSM8KRewardParser.extract_tags(text))


def spec_of_a_reward():
    env = ChatEnv(batch_size=(2,)).append_transform(GSM8KRewardParser())
    spec = env.full_reward_spec
    show([(key, spec[key].shape, spec[key].dtype) for key in KEYS])


def a_rollout_with_rewards():
    rows = [{"query": q, "answer": a} for q, a in GSM]
    env = DatasetChatEnv.from_dataloader(DataLoader(rows, batch_size=1), batch_size=(1,))
    env = env.append_transform(GSM8KRewardParser()).append_transform(StepCounter(max_steps=3))
    replies = iter(["I think so", "<answer>5</answer>"])

    def policy(td):
        reply = History.from_chats([[{"role": "assistant", "content": next(replies)}]])
        td["history"].full = td["history"].prompt.extend(reply, inplace=False, dim=-1)
        return td

    td = env.rollout(5, policy)
    show(td.batch_size, td["next", "reward"].shape, td["next", "reward"].flatten())
    show(td["next", "success"].flatten(), td["next", "done"].flatten())


def a_reward_in_text_mode():
    env = ChatEnv(input_mode="text", tokenizer=tokenizer()).append_transform(
        GSM8KRewardParser(tokenizer(), input_mode="text")
    )
    td = env.reset(TensorDict(query=["2+3?"], answer=["#### 5"], batch_size=(1,)))
    td["text"].response = ["<answer>5</answer><|im_end|>"]
    td["text"].full = [td["text"].prompt[0] + td["text"].response[0]]
    td["next", "answer"] = td["answer"]
    show(env.step(td)["next", "reward"])


def a_reward_and_a_second_thought():
    parser = GSM8KRewardParser()
    again = AddThinkingPrompt(lambda td: (td["reward"] < 1).all(), "Wait,")
    td = scored([parser, again], ["I say <answer>6</answer>"])
    show(td["reward"], td["done"], td["history"].prompt.content)


# -- several rewards ------------------------------------------------------------------------------


def two_rewards_of_which_one_is_right():
    first = GSM8KRewardParser(format_reward=0.25)
    show(
        scored([first, GSM8KRewardParser()], ["<answer>6</answer>", "<answer>5</answer>"])["reward"]
    )


# -- MATH and Countdown ---------------------------------------------------------------------------


MATH = [("How much?", r"Thus \boxed{\frac{1}{2}}")]


def an_answer_in_mathematics():
    replies = [f"<answer>{text}</answer>" for text in (r"\frac{1}{2}", r"\frac{1}{3}", "")]
    show_reward(scored(MATHRewardParser(), replies, MATH))


def boxes_of_a_text():
    for text in (r"\boxed{a} and \boxed{\frac{1}{2}}", "no box"):
        show(MATHRewardParser.extract_boxed(text))


def answers_that_match():
    for pair in (("7", "7"), ("7", "8"), ("$7$", "7"), ("1,000", "1000")):
        show(MATHRewardParser.answers_match(*pair))


COUNTDOWN = [("Make 10 of 2, 3, 5.", "target=10, numbers=2,3,5")]


def an_expression_for_a_target():
    texts = ("2+3+5", "2*5", "10", "5+5", "(2+3)*5", "2+3", "two")
    replies = [f"<think>a</think><answer>{text}</answer>" for text in texts]
    td = scored(CountdownRewardParser(), replies, COUNTDOWN)
    show(td["success"].flatten(), td["reward"].flatten())


def expressions_that_are_valid():
    check = CountdownRewardParser.validate_expression
    for text in ("2+3+5", "5*2", "3+3+4", "20/2", "(5-3)*5", ""):
        show(check(text, 10, [2, 3, 5]))


# -- IFEval ---------------------------------------------------------------------------------------


INSTRUCTIONS = {
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
    "kwargs": [{}, {}],
    "key": 7,
}


def followed(scorer, reply, ids=INSTRUCTIONS["instruction_id_list"], before=()):
    env = ChatEnv(batch_size=(1,))
    for transform in (*before, scorer):
        env = env.append_transform(transform)
    columns = {
        "query": ["Say hi without commas and with a title."],
        "answer": ["#### 5"],
        "key": torch.tensor([7]),
        "instruction_id_list": [ids],
        "kwargs": [[{} for _ in ids]],
    }
    td = env.reset(TensorDict(columns, batch_size=(1,)))
    full = td["history"].prompt.extend(
        History.from_chats([[{"role": "assistant", "content": reply}]]), inplace=False, dim=-1
    )
    td["history"].full = full
    td["next", "answer"] = td["answer"]
    return env.step(td)["next"]


def show_score(td):
    for level in (
        "prompt_level_strict",
        "inst_level_strict",
        "prompt_level_loose",
        "inst_level_loose",
    ):
        show((level, td["ifeval_score", f"{level}_acc"].flatten().int().tolist()))


def scores_by_attribute():
    td = followed(IfEvalScorer(), "<answer>Hi there</answer>")
    show(td["ifeval_score"].prompt_level_strict_acc.shape)


def instructions_that_are_followed():
    td = followed(IfEvalScorer(), "<think>a</think><answer><<Title>>\nHi there</answer>")
    show_score(td)
    show(td["reward"], td["done"])


def instructions_of_which_one_is_followed():
    td = followed(IfEvalScorer(), "<answer>Hi there</answer>")
    show_score(td)
    show(td["reward"], td["done"])


def instructions_without_an_answer():
    td = followed(IfEvalScorer(), "Hi there")
    show_score(td)
    show(td["reward"], td["done"])


def instructions_with_other_weights():
    scorer = IfEvalScorer(format_weights=[0.0, 1.0, 0.0, 0.0])
    show(followed(scorer, "<answer>Hi there</answer>")["reward"])


def instructions_without_a_reward():
    td = followed(IfEvalScorer(aggregate_reward=False), "<answer>Hi there</answer>")
    show_score(td)
    show("reward" in td.keys())


def instructions_with_a_reward_of_ones_own():
    def aggregate(score, think_blocks=None, answer_blocks=None, complete=None):
        return torch.tensor([float(len(answer_blocks)) + len(think_blocks)])

    scorer = IfEvalScorer(aggregate_reward=aggregate)
    show(followed(scorer, "<think>a</think><answer>Hi</answer>")["reward"])


def instructions_without_a_reward_behind_another():
    scorer = IfEvalScorer(aggregate_reward=False)
    td = followed(scorer, "<answer>5</answer>", before=[GSM8KRewardParser()])
    show(td["reward"], td["success"])


def attributes_of_a_scorer():
    scorer = IfEvalScorer()
    show(scorer.instruction_ids_key, scorer.keyword_args_key, scorer.id_key, scorer.score_key)
    show(scorer.format_weights, scorer.aggregate_reward, scorer.verbose, scorer.set_done_if_answer)


def a_score():
    data = IFEvalScoreData(
        prompt_level_strict_acc=torch.tensor(True),
        inst_level_strict_acc=torch.tensor([True, False]),
        prompt_level_loose_acc=torch.tensor(True),
        inst_level_loose_acc=torch.tensor([True, True]),
        batch_size=(),
    )
    show(data.prompt_level_strict_acc.shape, data.inst_level_strict_acc.float().mean())


def default_reward(**blocks):
    data = IFEvalScoreData(
        prompt_level_strict_acc=torch.tensor([False]),
        inst_level_strict_acc=torch.tensor([True, False]),
        prompt_level_loose_acc=torch.tensor([True]),
        inst_level_loose_acc=torch.tensor([True, True]),
        batch_size=(),
    )
    return IfEvalScorer().default_reward_aggregator(data, **blocks)


def the_default_reward_is_a_tensor():
    show(default_reward(), default_reward(answer_blocks=["b"], complete=True))
    show(default_reward(think_blocks=["a", "b"]).to(torch.float64).dtype)


def the_default_reward_of_a_score_that_lacks_some():
    names = ("prompt_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")
    half = torch.tensor([True, False])
    data = IFEvalScoreData(inst_level_strict_acc=half, **dict.fromkeys(names), batch_size=())
    show(IfEvalScorer().default_reward_aggregator(data))


def the_default_reward_of_several_scores():
    column = torch.tensor([[True], [False]])
    data = IFEvalScoreData(
        prompt_level_strict_acc=column,
        inst_level_strict_acc=column,
        prompt_level_loose_acc=column,
        inst_level_loose_acc=~column,
        batch_size=(2,),
    )
    show(IfEvalScorer(format_weights=[1, 2, 3, 4]).default_reward_aggregator(data))


def a_reward_made_of_the_default_one():
    scorer = IfEvalScorer()

    def twice(data, think_blocks=None, answer_blocks=None, complete=None):
        made = scorer.default_reward_aggregator(data, think_blocks, answer_blocks, complete)
        return 2 * made

    td = followed(IfEvalScorer(aggregate_reward=twice), "<answer>Hi there</answer>")
    show(round(float(td["reward"]), 3))


PROGRAMS = {
    "a_right_answer": lambda: show_reward(
        scored(GSM8KRewardParser(), ["<think>easy</think><answer>5</answer>"])
    ),
    "a_wrong_answer": lambda: show_reward(
        scored(GSM8KRewardParser(), ["<think>easy</think><answer>6</answer>"])
    ),
    "no_answer": lambda: show_reward(scored(GSM8KRewardParser(), ["It is five."])),
    "an_answer_and_the_end_of_the_turn": lambda: show(
        scored(GSM8KRewardParser(tokenizer()), ["<answer>5</answer><|im_end|>"])["reward"]
    ),
    "an_answer_that_is_given_again": lambda: show(
        scored(GSM8KRewardParser(), ["<answer>4</answer> no: <answer>5</answer>"])["success"]
    ),
    "mode_of_a_parser_alone": lambda: show(GSM8KRewardParser().input_mode),
    "two_rewards_of_one_step": lambda: show_reward(
        scored([GSM8KRewardParser(), GSM8KRewardParser()], ["<answer>5</answer>"])
    ),
    "an_expression_that_reaches_the_target": lambda: show_reward(
        scored(CountdownRewardParser(), ["<answer>2+3+5</answer>"], COUNTDOWN)
    ),
    "an_expression_that_does_not": lambda: show_reward(
        scored(CountdownRewardParser(), ["<answer>2+3</answer>"], COUNTDOWN)
    ),
    "columns_that_a_scorer_does_not_need": lambda: show(
        IfEvalScorer().prompt_key, IfEvalScorer().response_key
    ),
    "the_default_reward_of_a_score": lambda: show(
        round(float(default_reward(think_blocks=["a"], answer_blocks=["b"])), 4)
    ),
    "keys_that_a_parser_reads": lambda: show(
        ChatEnv().append_transform(GSM8KRewardParser()).transform.in_keys
    ),
    "instructions_that_do_not_end_the_episode": lambda: show(
        followed(IfEvalScorer(set_done_if_answer=False), "<answer>Hi</answer>")["done"]
    ),
    "instructions_under_another_key": lambda: show(
        "score" in followed(IfEvalScorer(score_key="score"), "<answer>Hi</answer>").keys()
    ),
    "instructions_behind_another_reward": lambda: show(
        followed(IfEvalScorer(), "<answer>5</answer>", before=[GSM8KRewardParser()])["reward"]
    ),
}
"""Programs of one expression."""
