"""The learner's book of versions and digests."""

import pytest

from torchrl_llm.errors import WeightUpdateError
from torchrl_llm.weights import WeightLedger


def test_rows_are_checked_against_what_was_proven():
    ledger = WeightLedger()
    ledger.record(1, "aa")
    ledger.record(2, "bb")
    ledger.record(2, "bb")
    ledger.check({1: "aa", 2: "bb"}, versions=[1, 2, 2])
    ledger.check({})
    with pytest.raises(
        WeightUpdateError, match=r"claim version 2 .* digest 'aa'; that version is 'bb'"
    ):
        ledger.check({1: "aa", 2: "aa"})
    with pytest.raises(WeightUpdateError, match="version 3 of the weights, which was never proven"):
        ledger.check({3: "aa"})
    with pytest.raises(WeightUpdateError, match=r"tokens of version 2, .* it gave \[1\]"):
        ledger.check({1: "aa"}, versions=[1, 2])


def test_versions_that_nobody_proved_may_pass():
    ledger = WeightLedger()
    ledger.record(1, "aa")
    ledger.check({0: "anything", 1: "aa"}, proven=False)
    with pytest.raises(WeightUpdateError, match="that version is 'aa'"):
        ledger.check({0: "anything", 1: "bb"}, proven=False)


def test_a_version_has_one_value():
    ledger = WeightLedger()
    ledger.record(1, "aa")
    with pytest.raises(WeightUpdateError, match="version 1 of the weights is 'aa'"):
        ledger.record(1, "bb")
    assert ledger.digest(1) == "aa"


def test_the_newest_versions_are_kept_and_survive_a_checkpoint():
    ledger = WeightLedger(keep=3)
    for version in range(6):
        ledger.record(version, f"{version:02d}")
    assert (len(ledger), ledger.digest(2), ledger.digest(3)) == (3, None, "03")
    resumed = WeightLedger(keep=3)
    # A checkpoint in JSON has strings for keys.
    digests = {str(version): value for version, value in ledger.state_dict()["digests"].items()}
    resumed.load_state_dict({"digests": digests})
    resumed.check({3: "03", 4: "04", 5: "05"})
