"""Held-out conversations of a run: those that changed are shown, with what became of them."""

from torchrl_llm.trainers.held_out import changed_conversations, compare_conversations


def said(*answers):
    """Conversations about ``1+1``, whose right answer is 2."""
    return [f"user: 1+1\nassistant: {n}\n-> {'right' if n == 2 else 'wrong'}" for n in answers]


def test_two_that_became_right_are_picked_and_one_that_became_wrong():
    # by index: same, wrong -> wrong, wrong -> right, right -> wrong, wrong -> right, right -> wrong
    before, after = said(2, 3, 4, 2, 5, 2), said(2, 4, 2, 7, 2, 8)
    assert changed_conversations(before, after) == [2, 4, 3]


def test_one_that_is_still_wrong_is_picked_where_fewer_became_right():
    assert changed_conversations(said(3, 2, 5), said(4, 2, 2)) == [2, 0]
    assert changed_conversations(said(3, 3, 3), said(4, 4, 4)) == [0, 1]


def test_one_that_got_worse_is_shown_alone_where_nothing_else_changed():
    assert changed_conversations(said(3, 2), said(3, 4)) == [1]


def test_an_evaluation_without_verdicts_shows_the_first_that_changed():
    assert changed_conversations(["a", "b", "c"], ["a", "d", "e"]) == [1, 2]


def test_the_prompt_is_shown_once_and_both_answers_below_it():
    text = compare_conversations(said(2, 3), said(2, 2))
    assert text.splitlines() == [
        "held-out conversation 2",
        "  user: 1+1",
        "  before training",
        "    assistant: 3",
        "    -> wrong",
        "  after training",
        "    assistant: 2",
        "    -> right",
    ]


def test_a_run_that_changed_nothing_says_so():
    text = compare_conversations(said(2, 3), said(2, 3))
    assert text == "training changed none of the first 2 held-out conversations"


def test_other_prompts_than_before_are_not_compared():
    assert compare_conversations(said(2), said(2, 3)).endswith("conversations are not compared")


def test_conversations_cannot_control_the_terminal():
    text = compare_conversations(["\x1b[2Ja"], ["b\x07"])
    assert text.splitlines()[1:] == ["  before training", "    a", "  after training", "    b"]
