"""Templates: rendering a history, reading a text, and the masks of both."""

from __future__ import annotations

from _shared import CHAT, OTHER, show, tokenizer
from tensordict import lazy_stack
from torchrl.data.llm import History, add_chat_template
from torchrl.modules.llm.policies import ChatHistory

TOOL_CHAT = [
    {"role": "user", "content": "What is 2+2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    },
]


def text_with_a_generation_prompt():
    chat = History.from_chats(CHAT[:2])
    for add in (True, False):
        show(chat.apply_chat_template(tokenizer=tokenizer(), add_generation_prompt=add))


def text_by_name_of_a_template():
    chat = History.from_chats(CHAT)
    for name in ("chatml_format", "qwen", "llama", "falcon", "deepseek"):
        show(
            chat.apply_chat_template(
                tokenizer=tokenizer(), chat_template_name=name, add_generation_prompt=False
            )
        )


def ids_of_a_conversation():
    chat = History.from_chats(CHAT)
    out = chat.apply_chat_template(
        tokenizer=tokenizer(), tokenize=True, return_tensors="pt", return_dict=True
    )
    show(type(out).__name__, sorted(out.keys()), out["input_ids"].shape)


def ids_read_back_as_the_text():
    chat = History.from_chats(CHAT)
    out = chat.apply_chat_template(
        tokenizer=tokenizer(),
        tokenize=True,
        return_tensors="pt",
        return_dict=True,
        add_generation_prompt=False,
    )
    show(tokenizer().decode(out["input_ids"].flatten().tolist()))


def assistant_tokens_of_a_conversation():
    chat = History.from_chats(CHAT)
    out = chat.apply_chat_template(
        tokenizer=tokenizer(),
        return_tensors="pt",
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
        chat_template_name="qwen",
    )
    ids, mask = out["input_ids"].flatten(), out["assistant_masks"].flatten().bool()
    show(out["assistant_masks"].dtype, tokenizer().decode(ids[mask].tolist()))


def padded_ids_of_a_batch():
    batch = History.from_chats([CHAT, OTHER])
    out = batch.apply_chat_template(
        tokenizer=tokenizer(), tokenize=True, padding=True, return_tensors="pt", return_dict=True
    )
    show(out["input_ids"].shape, out["attention_mask"].sum(-1))


def ids_where_nothing_else_is_asked_for():
    for chats in (CHAT, [CHAT, OTHER]):
        out = History.from_chats(chats).apply_chat_template(tokenizer=tokenizer(), tokenize=True)
        show(type(out).__name__)


def the_same_ids_without_a_dict():
    out = History.from_chats(CHAT).apply_chat_template(
        tokenizer=tokenizer(), tokenize=True, return_dict=False, return_tensors="pt"
    )
    show(out.flatten())


def a_stack_of_stacks_as_text():
    history = History.from_chats([CHAT, OTHER])
    chats = ChatHistory(prompt=history, batch_size=[2])
    text = lazy_stack([chats, chats]).to_text(tokenizer())
    show(text.batch_size, text[1][0].prompt)
    ids = lazy_stack([chats, chats]).to_tokens(tokenizer())
    show(ids.batch_size, chats[1].to_text(tokenizer()).batch_size)


def a_template_of_my_own():
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['role'] + '=' + m['content'] + ';' }}{% endif %}{% endfor %}"
    )
    add_chat_template("mine", template)
    chat = History.from_chats(CHAT)
    show(
        chat.apply_chat_template(
            tokenizer=tokenizer(), chat_template_name="mine", add_generation_prompt=False
        ),
        chat.apply_chat_template(
            tokenizer=tokenizer(), chat_template=template, add_generation_prompt=False
        ),
    )


def from_text_of_chatml():
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    back = History.from_text(text, chat_template_name="chatml_format")
    show(back.batch_size, back.role, back.content, back.is_complete)


def from_text_of_an_open_answer():
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi the"
    back = History.from_text(text, chat_template_name="qwen")
    show(back.role, back.content, back.is_complete)


def from_text_of_a_batch():
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    back = History.from_text([text, text], chat_template_name="qwen")
    show(back.batch_size, back.content)


def from_text_of_a_tool_call():
    text = (
        "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\nso:\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
    )
    back = History.from_text(text, chat_template_name="qwen")
    show(back.role, back.content, back[-1].tool_calls)


def from_text_strips_white_space():
    text = "<|im_start|>assistant\n  def f():\n    pass\n<|im_end|>\n"
    show(History.from_text(text, chat_template_name="qwen").content)


def round_trip_of_a_text():
    chat = History.from_chats(CHAT)
    for name in ("chatml_format", "qwen", "llama"):
        text = chat.apply_chat_template(
            tokenizer=tokenizer(), chat_template_name=name, add_generation_prompt=False
        )
        back = History.from_text(text, chat_template_name=name)
        show(name, back.role, back.content)


def a_message_with_tool_calls_rendered():
    chat = History.from_chats(TOOL_CHAT)
    show(
        chat.apply_chat_template(
            tokenizer=tokenizer(), chat_template_name="qwen", add_generation_prompt=False
        )
    )


def continuing_the_final_message():
    chat = History.from_chats(CHAT)
    show(
        chat.apply_chat_template(
            tokenizer=tokenizer(), add_generation_prompt=False, continue_final_message=True
        )
    )


def truncated_ids():
    chat = History.from_chats([CHAT, OTHER])
    out = chat.apply_chat_template(
        tokenizer=tokenizer(),
        tokenize=True,
        padding="max_length",
        truncation=True,
        max_length=16,
        return_tensors="pt",
        return_dict=True,
    )
    show(out["input_ids"].shape)


# -- what is left open ----------------------------------------------------------------------------

CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"


def from_text_without_a_template():
    show(History.from_text(CHATML), History.from_text(CHATML).is_complete)
    show(History.from_text(CHATML + "<|im_end|>\n").is_complete)


def ids_of_a_conversation_without_a_dict():
    history = History.from_chats(CHAT)
    ids = history.apply_chat_template(
        tokenizer=tokenizer(), tokenize=True, return_tensors="pt", return_dict=False
    )
    show(ids)


PROGRAMS = {
    "text_of_a_conversation": lambda: show(
        History.from_chats(CHAT).apply_chat_template(tokenizer=tokenizer(), tokenize=False)
    ),
    "a_template_without_a_generation_block": lambda: add_chat_template(
        "bad", "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ),
    "an_unknown_name_of_a_template": lambda: History.from_chats(CHAT).apply_chat_template(
        tokenizer=tokenizer(), chat_template_name="no such template"
    ),
    "from_texts_without_a_template": lambda: show(
        History.from_text([CHATML, "<|im_start|>user\nHo<|im_end|>\n"])
    ),
    "from_a_text_of_no_template": lambda: History.from_text("Hi there"),
    "text_of_a_batch": lambda: show(
        History.from_chats([CHAT, OTHER]).apply_chat_template(tokenizer=tokenizer(), tokenize=False)
    ),
    "ids_of_a_conversation_alone": lambda: show(
        History.from_chats(CHAT).apply_chat_template(tokenizer=tokenizer(), tokenize=True)
    ),
    "ids_of_a_batch_alone": lambda: show(
        History.from_chats([CHAT, OTHER]).apply_chat_template(tokenizer=tokenizer(), tokenize=True)
    ),
}
"""Programs of one expression."""
