from __future__ import annotations

import pytest
import torch

from torchrl_llm.errors import OverlongError
from torchrl_llm.evaluation import Conversation
from torchrl_llm.modules import Answer, FakeBackend, FakeWrapper, load_tokenizer
from torchrl_llm.tools import ToolTransform


class Listening(FakeBackend):
    """Remembers the ids of every prompt."""

    prompts: list[list[int]]

    def _sample(self, prompts, params, cancelled):
        self.__dict__.setdefault("prompts", []).extend(p.tolist() for p in prompts)
        return super()._sample(prompts, params, cancelled)


def talker(tokenizer, answers, **options):
    backend = Listening(answers, tokenizer=tokenizer, max_length=options.pop("max_length", 4096))
    return FakeWrapper(backend, tokenizer=tokenizer, **options), backend


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any.
    """
    return 2 * number


def test_what_was_sampled_is_never_encoded_again(tokenizer):
    # "the" is one token of this tokenizer; the model spells it with three.
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert tokenizer.encode("the", add_special_tokens=False) != spelled
    policy, backend = talker(tokenizer, [Answer(spelled), "Fine."])
    conversation = Conversation(policy, system_prompt="Be brief.")
    assert [conversation.say("Which word?"), conversation.say("Thanks.")] == ["the", "Fine."]
    first, second = backend.prompts
    sampled = [*first, *spelled, tokenizer.eos_token_id]
    assert second[: len(sampled)] == sampled
    assert [m["role"] for m in conversation.messages] == (["system", *["user", "assistant"] * 2])


def test_a_conversation_begins_anew_with_its_present_system_prompt(tokenizer):
    policy, backend = talker(tokenizer, "Yes.")
    conversation = Conversation(policy)
    assert conversation.messages == []
    conversation.say("Hello?")
    conversation.system_prompt = "Be kind."
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]
    conversation.say("Hello?")
    begun = [tokenizer.decode(prompt) for prompt in backend.prompts]
    assert "Be kind." not in begun[0]
    assert begun[1].count("Hello?") == 1
    assert "Be kind." in begun[1]


@pytest.mark.parametrize("wrapped", [False, True])
def test_tools_are_carried_out_until_there_is_an_answer(wrapped):
    policy, backend = talker(load_tokenizer(), [call("double", '{"number": 21}'), "42", "Bye."])
    tools = [ToolTransform([double])] if wrapped else [double]
    with Conversation(policy, tools=tools) as conversation:
        assert conversation.say("Twice 21?") == "42"
        assert [m["role"] for m in conversation.messages] == [
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        assert conversation.messages[2]["content"] == "42"
        assert conversation.say("Thanks.") == "Bye."
    assert len(backend.prompts) == 3


def test_a_model_that_only_calls_tools_is_not_asked_for_ever():
    policy, backend = talker(load_tokenizer(), call("double", '{"number": 1}'))
    tools = [ToolTransform([double], max_auxiliary_turns=2)]
    with Conversation(policy, tools=tools) as conversation:
        assert "double" in conversation.say("Twice 1?")
    # Two turns with calls, the one that is refused, and the one after it.
    assert len(backend.prompts) == 4


def test_a_full_context_leaves_the_conversation_as_it_was(tokenizer):
    # What training does with prompts that are too long is not what a person should get.
    policy, _ = talker(tokenizer, "Yes.", max_length=60, on_overlong="drop")
    conversation = Conversation(policy)
    conversation.say("Hello?")
    before = conversation.messages
    with pytest.raises(OverlongError, match="context holds 60"):
        conversation.say("word " * 60)
    assert conversation.messages == before
    assert conversation.say("Hi?") == "Yes."


def test_an_answer_that_was_cut_says_so(tokenizer):
    policy, _ = talker(tokenizer, "abcdefgh", generate_kwargs={"max_new_tokens": 3})
    conversation = Conversation(policy)
    assert (conversation.say("Spell!"), conversation.was_cut) == ("abc", True)
    assert conversation.say("Spell!", max_new_tokens=20) == "abcdefgh"
    assert not conversation.was_cut


def test_a_seed_repeats_a_sampled_answer(tokenizer):
    policy = FakeWrapper(tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8})
    answers = []
    for _ in range(2):
        torch.manual_seed(3)
        answers.append(Conversation(policy).say("Go."))
    assert answers[0] == answers[1]
