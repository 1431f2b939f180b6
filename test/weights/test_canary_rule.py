"""The rule of the canary by values: what is an error, what is rounding, and what cannot be told.

There are 64 tokens in the first rows and 192 in the others. Rounding is 0.01 nats everywhere, which
is the unit of all figures.
"""

import json

import pytest
import torch

from torchrl_llm.data.scoring import TokenScores
from torchrl_llm.errors import WeightUpdateError
from torchrl_llm.modules.backends import FakeBackend
from torchrl_llm.weights import CanaryJudge, CanaryTarget

UNIT = 0.01
ROWS = tuple(tuple(range(row, row + 20)) for row in range(16))


def target(exact=0.0, rounded=None, rows=ROWS):
    """Log-probs of -1, and what is added to them, in units."""
    tokens = 16 * len(rows)
    exact = -1 + UNIT * torch.as_tensor(exact).expand(tokens).float()
    rounded = exact if rounded is None else -1 + UNIT * torch.as_tensor(rounded).expand(tokens)
    return CanaryTarget(rows, 4, 4, exact, rounded.float(), torch.full((tokens,), UNIT))


class Engine(FakeBackend):
    """Computes what it is told to, in units away from -1, and counts the rows that it scored."""

    def __init__(self, found=0.0):
        super().__init__(vocab_size=64, eos_token_ids=(2,))
        self.found, self.scored = found, 0

    def token_scores(self, sequences, select, **options):
        whole = -1 + UNIT * torch.as_tensor(self.found).expand(256).float()
        first = 16 * int(sequences[0][0])
        self.scored += len(sequences)
        return TokenScores(whole[first : first + sum(int(mask.sum()) for mask in select)])


def noise(seed, size=256):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_what_rounding_explains_is_accepted_and_the_first_rows_are_enough():
    judge, engine = CanaryJudge(), Engine(noise(0))
    report = judge.check(engine, target())
    # The median of |x| of a normal variable is 0.67.
    assert report.difference == pytest.approx(0.67 * UNIT, rel=0.3)
    assert report.rounding == pytest.approx(0.67, rel=0.3)
    assert report.followed is None
    assert engine.scored == 4


def test_half_of_the_tokens_too_far_is_an_error_that_names_the_worst():
    judge = CanaryJudge()
    judge.check(Engine(), target())
    judge.check(Engine(4.9), target())
    found = torch.full((256,), 5.1)
    found[17] = 60.0
    with pytest.raises(
        WeightUpdateError,
        match=r"does not compute with version 7 of the weights: over 256 tokens it is 5.1 times as "
        r"far from the trainer as rounding explains \(5 is the limit; the median is 0.051 nats\); "
        r"token 6 at position 5 of canary row 1 has log-prob -0.4 there and -1 in the trainer",
    ):
        judge.check(Engine(found), target(), version=7)


def test_few_tokens_very_far_are_an_error_too_and_a_nan_is():
    judge = CanaryJudge()
    judge.check(Engine(), target())
    found = torch.zeros(256)
    found[::16] = 300.0  # one of sixteen: an outlier
    judge.check(Engine(found), target())
    found[::4] = 300.0  # one of four
    with pytest.raises(WeightUpdateError, match="60 times as far"):
        judge.check(Engine(found), target())
    found = torch.zeros(256)
    found[3] = torch.nan
    with pytest.raises(WeightUpdateError, match="at position 7 of canary row 0 has log-prob nan"):
        judge.check(Engine(found), target())


def test_doubt_over_the_first_rows_is_settled_by_the_others():
    judge, found = CanaryJudge(), torch.zeros(256)
    judge.check(Engine(), target())
    found[:64] = 8.0
    engine = Engine(found)
    judge.check(engine, target())
    assert engine.scored == 16


def test_kernels_that_round_twice_as_much_are_known_from_the_first_check():
    judge = CanaryJudge()
    judge.check(Engine(8.0), target())
    judge.check(Engine(9.0), target())
    strict = CanaryJudge()
    strict.check(Engine(1.0), target())
    with pytest.raises(WeightUpdateError, match="9 times"):
        strict.check(Engine(9.0), target())
    with pytest.raises(WeightUpdateError, match="11 times"):
        CanaryJudge().check(Engine(11.0), target())


def test_an_engine_left_behind_is_found_when_the_moves_have_added_up():
    judge = CanaryJudge()
    judge.check(Engine(), target(), version=1)
    # A unit at each of 64 tokens is a move of 8; 20 are clear, with the third version. What runs
    # beside the check moves the last bits of the engine.
    for version in (2, 3):
        moved = judge.check(Engine(1e-3 * version), target(version - 1.0), version=version)
        assert moved.followed is None
    with pytest.raises(
        WeightUpdateError, match=r"of the trainer's move since version 1 it made 0% \(100% with"
    ):
        judge.check(Engine(), target(3.0), version=4)
    # It is healed by the next load that arrives.
    assert judge.check(Engine(4.0), target(4.0), version=5).followed == pytest.approx(1.0)


def test_a_part_that_stayed_behind_is_found_by_the_part_of_the_move_that_it_missed():
    judge = CanaryJudge()
    judge.check(Engine(), target())
    move = 6 * noise(1)
    # The move is 6 * sqrt(64) = 48 long, and 30% are missed: 14, too little to be an error ...
    assert judge.check(Engine(0.7 * move), target(move)).followed == pytest.approx(0.7)
    # ... and half of it, 24 (48 over all rows), is one.
    judge = CanaryJudge()
    judge.check(Engine(), target())
    with pytest.raises(WeightUpdateError, match="it made 50%"):
        judge.check(Engine(0.5 * move), target(move))


def test_an_engine_of_which_no_bit_changes_is_stuck_however_small_the_steps():
    judge, engine = CanaryJudge(), Engine(noise(0))
    judge.check(engine, target())
    # The trainer moves by a thousandth of the rounding, which falls out otherwise at every token.
    judge.check(engine, target(0.001, rounded=noise(1)))
    with pytest.raises(WeightUpdateError, match="no bit of its log-probs has changed"):
        judge.check(engine, target(0.002, rounded=noise(2)))


def test_weights_that_did_not_change_or_hardly_are_no_reason_to_move():
    judge, engine = CanaryJudge(), Engine(noise(0))
    rounded = noise(1)
    for version in range(50):
        some = torch.zeros(256)
        some[version % 10 :: 10] = 1.0  # a few flipped bits, seen at one token of ten
        judge.check(engine, target(rounded=rounded + some * noise(version)))


def test_rounding_is_not_taken_for_a_move_that_was_missed():
    judge, exact = CanaryJudge(), torch.zeros(256)
    for version in range(300):
        exact = exact + 0.5 * noise(3 * version)
        judge.check(Engine(exact + 1.5 * noise(3 * version + 1)), target(exact))


def test_a_trainer_that_rounds_itself_is_no_reason_for_an_error():
    judge = CanaryJudge()
    for version in range(300):
        judge.check(Engine(noise(2 * version)), target(noise(2 * version + 1)))


def test_other_rows_begin_anew():
    judge, engine = CanaryJudge(), Engine(0.0)
    judge.check(engine, target())
    other = tuple(tuple(token + 1 for token in row) for row in ROWS)
    engine.token_scores = lambda *given, **options: TokenScores(
        -1 + UNIT * torch.full((64,), 100.0)
    )
    assert judge.check(engine, target(100.0, rows=other)).followed is None


def test_a_target_travels_as_json_and_what_is_none_is_refused():
    sent = target(noise(1), rounded=noise(2))
    got = CanaryTarget.from_json(json.loads(json.dumps(sent.to_json())))
    assert got[:3] == sent[:3]
    assert all(torch.equal(a, b) for a, b in zip(got[3:], sent[3:], strict=True))
    whole = sent.to_json()
    for change in (
        {"rows": [[1, 2]]},
        {"rows": "ab"},
        {"start": 0},
        {"num_first": 17},
        {"exact": [0.0]},
        {"spread": [0.0] * 256},
        {"rounded": ["x"] * 256},
    ):
        with pytest.raises(WeightUpdateError, match="what came as a canary is malformed"):
            CanaryTarget.from_json({**whole, **change})
    for broken in (None, 3, [], {}):
        with pytest.raises(WeightUpdateError, match="malformed"):
            CanaryTarget.from_json(broken)
