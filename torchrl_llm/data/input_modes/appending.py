"""Appends messages to sampled turns, for rows stored as token ids.

Text and tokens mode keep no messages. The model's turn is read from its ids. The text that the chat
template writes after the turn (the end of the turn, the new messages, the next generation prompt)
is encoded and appended, with its provenance. Sampled ids are never encoded again.

Next: :mod:`torchrl_llm.data.input_modes` calls this module. In history mode, the policy's formatter
does the same.

Shape legend: ``B`` rows, ``T_b`` tokens of row ``b``, ``N_b`` new tokens of row ``b``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.ragged import are_aligned, read_rows, unpad_rows
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.data.token_facts import find_fact
from torchrl_llm.errors import TemplateError

Message = Mapping[str, Any]


class NewText(NamedTuple):
    """Change of a row's text by an appended message: ``old`` at its end becomes ``new``."""

    old: str
    new: str


class Grown(NamedTuple):
    """Rows after an append.

    Attributes:
        columns: ``B`` tensors ``[T_b]`` for the name of each carried fact; unknown log-probs stay
            empty.
        texts: the change of each row's text.
    """

    columns: dict[str, list[Tensor]]
    texts: list[NewText]


class _Turn(NamedTuple):
    """The model's turn of one row: ids of prompt and response, and the start of the response."""

    token_ids: Tensor
    start: int
    finish_reason: FinishReason


def read_turns(
    formatter: ChatFormatter, td: TensorDictBase, responses: Sequence[Any]
) -> list[Message | None]:
    """Return the responses as messages.

    Args:
        formatter: formatter with the chat template.
        td: rows with ``("tokens", "full")``, or without ids if the policy writes only text.
        responses: the text of each response.
    """
    return [
        None if turn is None else _message(formatter, turn)
        for turn in _turns(formatter, td, responses)
    ]


def append_ids(
    formatter: ChatFormatter,
    td: TensorDictBase,
    columns: Mapping[str, Sequence[Tensor]],
    added: Sequence[Sequence[Message]],
    responses: Sequence[Any],
) -> Grown:
    """Append messages to the prompts that a step has written.

    Args:
        formatter: formatter with the chat template.
        td: rows after the policy's call.
        columns: the carried facts of the next prompts, by name; not changed.
        added: the messages of each row; an empty list leaves the row unchanged.
        responses: the text of each response.

    Raises:
        TemplateError: the template rejects the messages, or the row has no turn of the model.
    """
    grown = Grown(
        {name: list(rows) for name, rows in columns.items()}, [NewText("", "")] * len(added)
    )
    turns = _turns(formatter, td, responses)
    for row, new in enumerate(added):
        if not new:
            continue
        if turns[row] is None:
            raise TemplateError(f"row {row} has no response to append messages to")
        _append_row(formatter, grown, row, turns[row], list(new))
    return grown


def _append_row(
    formatter: ChatFormatter, grown: Grown, row: int, turn: _Turn, new: list[Message]
) -> None:
    prompt = grown.columns["token_ids"][row]
    if turn.start and not torch.equal(prompt[: turn.token_ids.shape[0]], turn.token_ids):
        raise TemplateError(
            f"row {row}: the prompt does not begin with the turn to which messages are "
            "appended. Leave out rows that are not stepped, and append transforms that rewrite the "
            "conversation (a context strategy) after transforms that add messages to it"
        )
    extension = formatter.extend_turn(
        turn.token_ids,
        _message(formatter, turn),
        turn.finish_reason,
        new,
        response_start=turn.start,
    )
    ids, source = extension.token_ids[extension.num_kept :], extension.source
    kept = prompt.shape[0]
    if kept > turn.token_ids.shape[0]:
        kept, ids, source = _behind_others(formatter, prompt, new)
    grown.texts[row] = NewText(formatter.decode(prompt[kept:]), formatter.decode(ids))
    if not prompt.shape[0]:
        return  # the policy writes text only: the next prompt is encoded as a whole
    given = {"token_ids": ids, "source": source.to(torch.int8)}
    for name, column in grown.columns.items():
        if not column[row].shape[0]:
            continue  # the log-probs were not known before
        more = given[name] if name in given else find_fact(name).filled(ids.shape[0])
        column[row] = torch.cat([column[row][:kept], more])


def _behind_others(
    formatter: ChatFormatter, prompt: Tensor, new: list[Message]
) -> tuple[int, Tensor, Tensor]:
    """Return ids that follow messages appended by a different transform in the same step.

    Returns:
        The number of prompt ids to keep (the end of the prompt is repeated after the new messages),
        the ids to append, and the source of each.
    """
    stand_in = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Yes."},
        {"role": new[0]["role"], "content": "Done."},
    ]
    before, after = formatter.encode_batch([stand_in, [*stand_in, *new]])
    short, long = before.token_ids.tolist(), after.token_ids.tolist()
    pairs = zip(short, long, strict=False)
    shared = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(short), len(long)))
    end = short[shared:]
    kept = prompt.shape[0] - len(end)
    if prompt[kept:].tolist() != end:
        raise TemplateError(
            f"a message of role {new[0]['role']!r} cannot follow the messages that were appended "
            "before it in this step: with this chat template the prompt does not end as expected"
        )
    return kept, after.token_ids[shared:], after.source[shared:]


def _turns(
    formatter: ChatFormatter, td: TensorDictBase, responses: Sequence[Any]
) -> list[_Turn | None]:
    full = valid_rows(td, ("tokens", "full"))
    if full is None:
        return [_of_text(formatter, text) if isinstance(text, str) else None for text in responses]
    reasons = read_rows(td, ("tokens", "finish_reason"), None)
    turns: list[_Turn | None] = []
    for row, (ids, start) in enumerate(zip(full, _starts(td, full), strict=True)):
        reason = FinishReason.STOP if reasons is None else FinishReason(int(reasons[row]))
        # A response without a token (aborted, or to a prompt that was too long) is also a turn.
        there = 0 < ids.shape[0] >= start
        turns.append(_Turn(ids, start, reason) if there else None)
    return turns


def _starts(td: TensorDictBase, full: Sequence[Tensor]) -> list[int]:
    """The start of each response."""
    prompts = read_rows(td, ("tokens", "prompt"))
    answers = read_rows(td, ("tokens", "response"), None)
    turn = aligned_rows(valid_rows(td, ("trace", "turn")), full)
    starts = []
    for row, ids in enumerate(full):
        start = prompts[row].shape[0]
        padded = answers is not None and start + answers[row].shape[0] != ids.shape[0]
        if padded and turn is not None:
            start = int((turn[row] == turn[row].max()).nonzero()[0])
        starts.append(start)
    return starts


def _of_text(formatter: ChatFormatter, text: str) -> _Turn:
    ids = formatter.tokenizer(text, add_special_tokens=False)["input_ids"]
    return _Turn(torch.tensor(ids, dtype=torch.int64), 0, FinishReason.STOP)


def _message(formatter: ChatFormatter, turn: _Turn) -> dict[str, Any]:
    prompt, response = turn.token_ids[: turn.start], turn.token_ids[turn.start :]
    return formatter.parse_response(prompt, response, turn.finish_reason)


def aligned_rows(column: list[Tensor] | None, rows: Sequence[Tensor]) -> list[Tensor] | None:
    """Return a column if its rows have the same lengths as the given rows, else ``None``."""
    return column if column is not None and are_aligned(column, rows) else None


def valid_rows(td: TensorDictBase, key: tuple[str, str]) -> list[Tensor] | None:
    """Return ragged rows unchanged, and right-padded dense rows cut to their valid tokens."""
    rows = read_rows(td, key, None)
    mask = read_rows(td, ("masks", "all_attention_mask"), None)
    if not rows or mask is None or not are_aligned(rows, mask) or all(bool(m.all()) for m in mask):
        return rows
    return unpad_rows(torch.stack(rows), torch.stack(mask))
