"""Which conversation a call continues."""

from torchrl_llm.data.chat import Chat
from torchrl_llm.gateway.conversation_tree import ConversationTree

USER = {"role": "user", "content": "Go."}


def said(text):
    return {"role": "assistant", "content": text}


def test_what_was_cut_and_went_on_with_nothing_that_is_shown_is_still_what_was_cut():
    tree = ConversationTree()
    tree.add(tree.find([USER]), Chat([USER, said("One,")]), said("One,"))
    begun = [USER, {**said("One,"), "is_complete": False}]
    place = tree.find(begun)
    # The rest was a stop string, which its client does not see.
    tree.add(place, Chat([USER, said("One, END")]), said(""), [said("One,")])
    assert tree.find(begun).chat.messages[-1] == said("One,")
    assert tree.find([USER, said("One, END"), USER]).chat.messages[1] == said("One, END")


def test_a_conversation_with_other_tools_is_another_one_and_the_cause_says_so():
    tree, tool = ConversationTree(), {"function": {"name": "add"}}
    tree.add(tree.find([USER]), Chat([USER, said("Yes.")]), said("Yes."))
    longer = [USER, said("Yes."), USER]
    assert tree.find(longer).cause is None
    assert tree.find(longer, [tool]).cause == "tools_changed"
    assert tree.find([USER, said("No."), USER]).cause == "history_changed"
    assert tree.find(longer).cause == "branched"
