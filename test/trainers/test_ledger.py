import pytest

from torchrl_llm.errors import DataError
from torchrl_llm.trainers.ledger import TokenLedger


def test_a_step_that_adds_up_closes_and_is_reported():
    ledger = TokenLedger()
    ledger.count(generated=100, trained=60, filtered=20, truncated=10)
    ledger.count(invalid=6, surplus=3, stale=1)
    assert ledger.close() == 0
    assert ledger.metrics() == {
        "train/tokens_generated": 100,
        "train/tokens_trained": 60,
        "train/tokens_stale": 1,
        "train/tokens_filtered": 20,
        "train/tokens_truncated": 10,
        "train/tokens_invalid": 6,
        "train/tokens_surplus": 3,
        "train/tokens_lost": 0,
        "train/tokens_pending": 0,
    }
    ledger.count(generated=1, trained=1)
    assert ledger.close() == 0


def test_tokens_that_wait_for_their_group_are_carried_into_the_next_step():
    ledger = TokenLedger()
    ledger.count(generated=10, trained=6, pending=4)
    assert ledger.close() == 4
    ledger.count(generated=2, trained=6)
    assert ledger.close() == 0


def test_lost_tokens_and_tokens_counted_twice_are_errors():
    lost = TokenLedger()
    lost.count(generated=10, trained=9)
    with pytest.raises(DataError, match=r"generated 10 = 10 tokens, but trained 9 .* = 9"):
        lost.close()
    twice = TokenLedger()
    twice.count(generated=10, trained=10, filtered=1)
    with pytest.raises(DataError, match="does not close"):
        twice.close()


def test_an_unknown_column_is_an_error():
    with pytest.raises(AttributeError):
        TokenLedger().count(generatd=1)


def test_the_state_is_what_the_next_step_starts_from():
    ledger, other = TokenLedger(), TokenLedger()
    ledger.count(generated=10, trained=6, pending=4)
    ledger.close()
    other.load_state_dict(ledger.state_dict())
    other.count(trained=4)
    assert other.close() == 0
