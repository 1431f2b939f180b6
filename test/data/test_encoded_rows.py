"""Rows as bytes: nothing is lost on the way, and nothing that comes in is trusted."""

from __future__ import annotations

import ast
import datetime as dt
import json
import pickle
import random
import struct
import time
import tracemalloc
import zlib
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from collectors.collecting import make_env, make_policy
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorClass, TensorDict

import torchrl_llm.data.safe_values
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data import Chat, ChatHistory, Column, FinishReason, History, Source, TokenRecord
from torchrl_llm.data.nodes import own_rows, plain_node
from torchrl_llm.data.rollouts import split_rollout
from torchrl_llm.data.safe_bytes import HEAD_BYTES, from_bytes, to_bytes
from torchrl_llm.data.safe_values import safe_class
from torchrl_llm.data.scoring import Support
from torchrl_llm.data.wire import PackedRows, encode, pack_rows, unpack_row_list
from torchrl_llm.errors import ConfigError, DataError


def safely_sent(rows, **about):
    packed = PackedRows.open(encode(pack_rows(rows), about))
    assert packed.about == about
    return unpack_row_list(packed)


def pickled(rows, **about):
    """Between processes that trust each other."""
    return unpack_row_list(pickle.loads(pickle.dumps(pack_rows(rows))))


@pytest.fixture(params=[safely_sent, pickled])
def there_and_back(request):
    return request.param


def _records(**facts):
    """Of a prompt, and of a response to it with a support."""
    ids, source = torch.tensor([5, 6]), torch.tensor([0, 1])
    prompt = TokenRecord.from_prompt(ids, source, 1, **facts)
    support = Support(torch.tensor([4, 5, 6]), torch.tensor([2, 1]))
    said = torch.tensor([7, 8]), torch.tensor([-0.5, -1.0]), 3, FinishReason.STOP
    return prompt, prompt.respond(*said, support)


def leaves(row):
    """Every leaf by its path, with the classes of the nodes on the way."""
    found = {}
    for name, value in row._tensordict.items():
        if isinstance(value, torch.Tensor):
            found[(name,)] = (value.dtype, tuple(value.shape), value.tolist())
        elif isinstance(value, NonTensorData):
            found[(name,)] = value.data
        else:
            found[(name, "class")] = type(value).__name__
            found |= {(name, *path): v for path, v in leaves(plain_node(value)).items()}
    return found


def sealed(header, tail=b""):
    """A message with checksums that are right, whatever it holds."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = struct.pack("<Q", len(text)) + text + tail + bytes(-len(tail) % 8)
    head = struct.pack("<8sqqqI", b"tensors1", 0, 0, HEAD_BYTES + len(body), zlib.crc32(body))
    return head + struct.pack("<I", zlib.crc32(head)) + body


def saying(about, tensors=(), tail=b""):
    """A message of this JSON and these entries: type, shape, and where the bytes begin and end."""
    header = {
        str(place): {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        for place, (dtype, shape, *offsets) in enumerate(tensors)
    }
    text = about if isinstance(about, str) else json.dumps(about)
    return sealed(header | {"__metadata__": {"about": text}}, tail)


def claiming(tensors=(), tail=b"", texts=(), **parts):
    """A message whose header says what it likes, over as many bytes as are given."""
    size, text = len(tail), "".join(texts).encode()
    count = len(tensors)
    lengths = struct.pack(f"<{len(texts)}q", *map(len, texts))
    tensors = [*tensors, ["I64", [len(texts)], size, size + len(lengths)]]
    size += len(lengths)
    tensors += [["U8", [len(text)], size, size + len(text)]]
    rows = {"about": ["dict"], "rows": [0, []], "records": [0, []]}
    rows["texts"] = [str(count + 1), str(count)]
    return saying(rows | parts, tensors, tail + lengths + text)


# -- there and back -------------------------------------------------------------------------------


def test_rows_of_a_collector_come_back_leaf_by_leaf(there_and_back, tokenizer):
    collector = LLMCollector(
        make_env(3, tool="look"),
        policy=make_policy(tokenizer),
        dialog_turns_per_batch=6,
        yield_completed_trajectories=True,
    )
    rows = split_rollout(next(iter(collector))).tensordicts
    assert len({row["turn"].item() for row in rows}) > 1
    back = there_and_back(rows, worker="a", sequence=3)
    assert [leaves(row) for row in back] == [leaves(row) for row in rows]
    for row, old in zip(back, rows, strict=True):
        assert isinstance(row["history"], ChatHistory)
        assert isinstance(row["history", "prompt"], History)
        chat, before = row["history"].full.chats[0], old["history"].full.chats[0]
        assert chat.messages == before.messages
        assert chat.record.token_ids.tolist() == before.record.token_ids.tolist()
        assert chat.record.log_probs.tolist() == before.record.log_probs.tolist()
        assert chat.record.finish_reason is before.record.finish_reason
        assert type(chat.record.finish_reason) is FinishReason


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3), (1, 2, 3)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    message = from_bytes(to_bytes({"n": None}, {"x": tensor}))
    assert message.about == {"n": None}
    back = message.tensors["x"]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    assert back.shape == tensor.shape


def test_special_floats_and_slices_come_back():
    tensor = torch.tensor([[float("nan"), float("inf")], [-0.0, 1e-45]])[:, 1]
    assert not tensor.is_contiguous()
    back = from_bytes(to_bytes(None, {"x": tensor})).tensors["x"]
    assert back.tolist() == tensor.tolist() == [float("inf"), torch.tensor(1e-45).item()]
    back += 1  # memory of its own, that may be written


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(10**30), 0.1, "", "héllo \ud83d 🙂 \x00", b"\x00\xff"),
        *([], [1, [2]], (), (1, ("a",)), {1, 2}, frozenset({3})),
        *({}, {"a": {"b": [None]}}, {1: 2, (3,): "tuple", None: "none"}),
        *(["list", 1], ["tensor", 0], ["dict"], {"about": 1}),
        *(Source.SAMPLED, FinishReason.LENGTH),
        *(Decimal("0.10"), Decimal("1E+20"), dt.date(2024, 5, 7), dt.time(1, 2, 3, 4)),
        *(dt.datetime(2024, 5, 7, 1, 2, 3, 4, dt.UTC), dt.timedelta(-3, 2, 1)),
    ],
    ids=repr,
)
def test_plain_values_come_back_with_their_types(there_and_back, value):
    row = TensorDict()
    row.set_non_tensor("x", value)
    (back,) = there_and_back([row])
    got = back._tensordict["x"].data
    assert got == value
    assert type(got) is type(value)


def test_chats_records_and_supports_come_back(there_and_back):
    prompt, record = _records(fork_cause="window", earlier_turns=4)
    chats = [
        Chat([{"role": "user", "content": "Hi"}], prompt),
        Chat([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], record),
        Chat([], None),
    ]
    rows = [TensorDict() for _ in chats]
    for row, chat in zip(rows, chats, strict=True):
        row.set("chat", NonTensorData(chat))
        row.set("several", NonTensorData([chat, chat]))
    back = there_and_back(rows)
    for row, chat in zip(back, chats, strict=True):
        for got in (row._tensordict["chat"].data, *row._tensordict["several"].data):
            assert got.messages == chat.messages
            assert (got.record is None) == (chat.record is None)
    got = back[1]._tensordict["chat"].data.record
    assert got.policy_version.tolist() == record.policy_version.tolist()
    assert (got.turn.dtype, got.finish_reason) == (torch.int16, FinishReason.STOP)
    assert got.earlier_turns == record.earlier_turns == 4
    assert [part.tolist() for part in got.support] == [part.tolist() for part in record.support]
    assert (got.response_start, got.num_messages) == (2, 2)
    assert back[0]._tensordict["chat"].data.record.support is None


def test_rows_that_differ_in_their_keys_shapes_and_dtypes_come_back(there_and_back):
    rows = [
        TensorDict(a=torch.tensor([1, 2]), b=TensorDict(c=torch.tensor(1.5))),
        TensorDict(a=torch.tensor([3.0]), b=TensorDict()),
        TensorDict({"d": torch.ones(2, 2)}),
        TensorDict(),
    ]
    assert [leaves(row) for row in there_and_back(rows)] == [leaves(row) for row in rows]
    assert there_and_back([]) == []


def test_columns_of_the_same_bytes_keep_their_own_types(there_and_back):
    row = TensorDict(
        log_probs=torch.zeros(3),
        version=torch.zeros(3, dtype=torch.int32),
        mask=torch.ones(2, dtype=torch.bool),
        codes=torch.ones(2, dtype=torch.int8),
    )
    (back,) = there_and_back([row])
    assert leaves(back) == leaves(row)


def test_nodes_with_a_batch_of_their_own_come_back(there_and_back):
    row = TensorDict(
        dense=TensorDict(x=torch.arange(4).view(2, 2), batch_size=[2]),
        lazy=LazyStackedTensorDict(TensorDict(x=torch.ones(1)), TensorDict(x=torch.ones(2))),
    )
    row.set("chats", History.of([Chat([{"role": "user", "content": "a"}]), Chat()]))
    row.set("names", NonTensorStack("a", "b"))
    row.set("column", Column.of(["c", ("d",)]))
    (back,) = there_and_back([row])
    assert back["dense"].batch_size == (2,)
    assert back["dense", "x"].tolist() == [[0, 1], [2, 3]]
    assert [len(part["x"]) for part in back._tensordict["lazy"].tensordicts] == [1, 2]
    assert back["chats"].content == [["a"], []]
    assert back._tensordict["names"].tolist() == ["a", "b"]
    assert back._tensordict["column"].tolist() == ["c", ("d",)]


def test_a_class_of_the_users_own_is_sent_once_both_ends_know_it():
    class GBoard(TensorClass):
        cells: torch.Tensor

    row = TensorDict()
    row.set("board", GBoard(cells=torch.ones(3), batch_size=[]))
    with pytest.raises(DataError, match="GBoard is not known; see safe_class"):
        safely_sent([row])
    try:
        safe_class(GBoard)
        (back,) = safely_sent([row])
        assert isinstance(back["board"], GBoard)
        assert back["board"].cells.tolist() == [1, 1, 1]
        other = type("GBoard", (), {})
        with pytest.raises(ConfigError, match="not a tensorclass"):
            safe_class(other)
    finally:
        torchrl_llm.data.safe_values._CLASSES.pop("GBoard")


@pytest.mark.parametrize(
    "value", [object(), print, torch, random.Random(0), 1j], ids=lambda value: type(value).__name__
)
def test_what_has_no_safe_form_is_refused_with_its_key(value):
    row = TensorDict()
    row.set("inner", TensorDict())
    row["inner"].set_non_tensor("thing", value)
    with pytest.raises(DataError, match=r"key \('inner', 'thing'\): a .* has no safe form"):
        encode(pack_rows([row]))


# -- what comes in is not trusted -----------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


def test_nothing_here_can_unpickle():
    folder = Path(torchrl_llm.data.safe_values.__file__).parent
    for name in ("safe_bytes.py", "safe_values.py", "safe_state.py", "wire.py"):
        tree = ast.parse((folder / name).read_text())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        imports = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not names & {"pickle", "eval", "exec", "__import__", "marshal"}
        assert not imports & {"pickle", "marshal", "importlib"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        pickle.dumps(Bomb()),
        bytes(4),
        bytes(12),
        sealed(b"\xff\xfe"),
        sealed({}),
        sealed([]),
        sealed({"0": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        sealed(b"[" * 100_000),
        saying("\xff\xfe"),
        saying("[" * 100_000),
        saying({}),
        saying([]),
        saying(1),
        claiming([["F31", [1], 0, 8]], bytes(8)),
        claiming([["F8_E5M2", [1], 0, 1]], bytes(1)),
        claiming([["I64", [-1], 0, 8]], bytes(8)),
        claiming([["I64", [2], 0, 8]], bytes(8)),
        claiming([["I64", [1], 8, 16]], bytes(8)),
        claiming([["I64", [1], 4, 12]], bytes(16)),
        claiming([["I64", [1], 0, 8], ["I64", [1], 0, 8]], bytes(8)),
        claiming([["I64", [1 << 62, 1 << 62], 0, 16]], bytes(16)),
        claiming([["I64", [0, 1 << 62], 0, 0]]),
        claiming([["I64", [1] * 17, 0, 8]], bytes(8)),
        claiming([["I64", [True], 0, 8]], bytes(8)),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_bytes_that_are_no_rows_are_refused(data, capsys):
    with pytest.raises(DataError):
        PackedRows.open(data)
    assert "executed" not in capsys.readouterr().out


def _message():
    record = _records()[0]
    rows = [
        TensorDict(ids=torch.arange(i + 1), inner=TensorDict(x=torch.ones(2))) for i in range(3)
    ]
    for row in rows:
        row.set("chat", NonTensorData(Chat([{"role": "user", "content": "Hi"}], record)))
        row.set_non_tensor("about", {"a": [1, (2, "b")]})
        row.set("history", History.of([Chat([{"role": "user", "content": "Hi"}])])[0])
    rows[0].set("more", torch.ones(1))
    return encode(pack_rows(rows), {"worker": "a"})


def _opened(data):
    _, about, tensors = from_bytes(data)
    PackedRows.open(to_bytes(about, tensors))
    return about, tensors


def test_every_cut_and_every_flipped_byte_is_noticed():
    data = _message()
    PackedRows.open(data)
    for length in range(0, len(data), 7):
        with pytest.raises(DataError):
            PackedRows.open(data[:length])
    for place in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[place] ^= 0x5A
        with pytest.raises(DataError):
            PackedRows.open(bytes(damaged))


def _mutations(header, rng, *, inflate=False):
    """One place of a header replaced by something else, or repeated; an endless supply."""
    fillers = [*(None, True, -1, 0, 1, 5, 1 << 70, 1.5, "x", ""), *([], {}, ["dict", 1], [[0]])]
    fillers += [
        ["tensor"],
        ["enum", "Source", 99],
        ["class", "History", None, {}],
        ["bytes", "é"],
        [0, 0, 0],
    ]
    if inflate:
        fillers += [(1 << 20) - 1, 1 << 12, ["stack", 0, ["dict", [], []]], ["dict", [1 << 19], []]]
    while True:
        changed = json.loads(json.dumps(header))
        node, key = {"": changed}, ""
        for _ in range(rng.randrange(1, 9)):
            inner = node[key]
            if not inner or not isinstance(inner, (list, dict)):
                break
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            node, key = inner, rng.choice(list(keys))
        if rng.random() < 0.3 and isinstance(node, (list, dict)):
            del node[key]
        elif inflate and rng.random() < 0.4:
            node[key] = [node[key]] * rng.choice([2, 300])
        elif inflate and isinstance(node[key], list) and node[key]:
            node[key] = node[key] + [node[key][-1]] * rng.choice([2, 300])
        else:
            node[key] = rng.choice(fillers)
        yield changed


def test_headers_that_lie_give_rows_or_a_data_error_and_nothing_else():
    header, tensors = _opened(_message())
    rng = random.Random(0)
    refused = 0
    for changed, _ in zip(_mutations(header, rng), range(3000), strict=False):
        data = to_bytes(changed if not isinstance(changed, str) else {}, tensors)
        try:
            packed = PackedRows.open(data)
        except DataError:
            refused += 1
            continue
        # What was let through can be unpacked, whatever it says.
        assert len(unpack_row_list(packed)) == packed.num_rows
    assert refused > 1500


def test_a_record_that_lies_about_its_length_is_refused():
    header, tensors = _opened(_message())
    assert any(path == ["log_probs"] for path, *_ in header["records"][1])
    tensors["log_probs"] = torch.zeros(1, 7)
    with pytest.raises(DataError):
        PackedRows.open(to_bytes(header, tensors))


@pytest.mark.parametrize("num_ids", [2, 4])
def test_a_support_that_lies_about_its_number_of_ids_is_refused(num_ids):
    record = _records()[1]
    lying = replace(record, support=record.support._replace(token_ids=torch.arange(num_ids)))
    row = TensorDict()
    row.set("chat", NonTensorData(Chat([{"role": "user", "content": "Hi"}], lying)))
    with pytest.raises(DataError, match="a support's counts"):
        safely_sent([row])


def test_only_known_classes_are_built():
    header, tensors = _opened(_message())
    text = json.dumps(header)
    assert '"History"' in text
    for name in ("TensorDict", "object", "subprocess.Popen", "History2"):
        lying = json.loads(text.replace('"History"', json.dumps(name)))
        with pytest.raises(DataError):
            PackedRows.open(to_bytes(lying, tensors))


# -- what a message costs is bounded by its bytes --------------------------------------------------

MANY = (1 << 20) - 1
MODULUS = (1 << 61) - 1  # integers that differ by it have the same hash


def one_column(kind, content, num_rows=1):
    return {"rows": [num_rows, [[["x"], kind, None, content]]]}


def nested(text, depth, inner):
    return json.loads(text * depth + inner + "]" * depth)


def cost_of(data):
    """Seconds of the processor and bytes of memory at most, of reading a message to its rows."""
    tracemalloc.start()
    started = time.process_time()
    try:
        rows = own_rows(unpack_row_list(PackedRows.open(data)))
        said = f"{len(rows)} rows"
        # Memory of torch is not traced; a tensor that is taken twice would be counted twice here.
        tensors = sum(t.nbytes for row in rows for t in row.values() if isinstance(t, torch.Tensor))
    except DataError as error:
        said, tensors = str(error), 0
    used_s = time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1] + tensors
    tracemalloc.stop()
    return said, used_s, peak


def assert_paid_for(data, said, used_s, peak):
    # Measured: 4 us and 60 bytes for each byte at most; tracing makes it four times as slow.
    assert used_s < 0.5 + 50e-6 * len(data), (len(data), said)
    assert peak < (1 << 20) + 200 * len(data), (len(data), said)


AMPLIFIED = {
    "rows": claiming(rows=[MANY, []]),
    "nodes of rows": claiming(rows=[MANY, [[[f"n{i}"], "node", None, None] for i in range(8)]]),
    "rows of an empty tensor": claiming(
        [["I64", [MANY, 0], 0, 0]], **one_column("tensor", ["0", None], MANY)
    ),
    "a node of many rows": claiming(**one_column("whole", [["dict", [MANY], []]])),
    "a cell of many rows": claiming(**one_column("whole", [["cell", [MANY], 0]])),
    "one tensor in many columns": claiming(
        [["U8", [1, 1 << 16], 0, 1 << 16]],
        bytes(1 << 16),
        rows=[1, [[[f"x{i}"], "tensor", None, ["0", None]] for i in range(2000)]],
    ),
    "one tensor in many values": claiming(
        [["U8", [1 << 16], 0, 1 << 16]], bytes(1 << 16), ['["tensor","0"]'] * 2000
    ),
    "one tensor in many nodes": claiming(
        [["U8", [1 << 16], 0, 1 << 16]],
        bytes(1 << 16),
        **one_column("whole", [["tensor", "0"]] * 2000, 2000),
    ),
    "many tensors of the same bytes": claiming(
        [["U8", [1 << 16], 0, 1 << 16]] * 2000,
        bytes(1 << 16),
        **one_column("whole", [["tensor", str(i)] for i in range(2000)], 2000),
    ),
    "a tensor of many dimensions": claiming([["I64", [10**4000] * 1000, 0, 8]], bytes(8)),
    "stacks of stacks": claiming(
        **one_column("whole", [nested('["stack",0,', 25, '["dict",[],[]]')])
    ),
    "numbers of one hash in a set": claiming(
        about=["dict", ["x", ["set", *(i * MODULUS for i in range(20_000))]]]
    ),
    "numbers of one hash in a dict": claiming(
        about=["dict", *([i * MODULUS, 0] for i in range(20_000))]
    ),
    "lists of lists": claiming(about=["dict", ["x", nested('["list",', 400, "0")]]),
    "a key of many names": claiming(rows=[1, [[["x"] * 10_000, "node", None, None]]]),
    "a long wrong type": claiming([["x" * 100_000, [1], 0, 8]], bytes(8)),
    "a long wrong name": claiming(
        **one_column("whole", [["class", "x" * 100_000, ["dict", [], []], {}]])
    ),
}


@pytest.mark.parametrize("name", AMPLIFIED)
def test_a_claim_without_bytes_for_it_is_refused_before_it_costs_anything(name):
    data = AMPLIFIED[name]
    said, used_s, peak = cost_of(data)
    assert_paid_for(data, said, used_s, peak)
    assert said.startswith(("a message holds no rows", "the header of a message is malformed"))
    assert len(said) < 300


def test_no_header_costs_more_than_its_bytes_pay_for():
    header, tensors = _opened(_message())
    rng = random.Random(1)
    for changed, _ in zip(_mutations(header, rng, inflate=True), range(400), strict=False):
        data = to_bytes(changed if not isinstance(changed, str) else {}, tensors)
        assert_paid_for(data, *cost_of(data))


def test_rows_without_a_byte_of_their_own_come_back(there_and_back):
    rows = [TensorDict(x=TensorDict(), empty=torch.ones(0)) for _ in range(300)]
    assert [leaves(row) for row in there_and_back(rows)] == [leaves(row) for row in rows]
    row = TensorDict(inner=TensorDict(batch_size=[5000]))
    (back,) = there_and_back([row])
    assert back["inner"].batch_size == (5000,)
    back = from_bytes(to_bytes(None, {"x": torch.ones(5000, 0)})).tensors["x"]
    assert back.shape == (5000, 0)


def test_values_that_cannot_be_read_are_not_written():
    value = []
    for _ in range(300):
        value = [value]
    row = TensorDict()
    row.set_non_tensor("x", value)
    with pytest.raises(DataError, match="nested more than 256 deep"):
        encode(pack_rows([row]))
