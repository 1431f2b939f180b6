"""MATH answers: equal as text, equal as mathematics, and those that never finish."""

from __future__ import annotations

import builtins
import pickle
import subprocess
import sys
import threading
import time

import pytest
from cases import cases
from rewards.test_answer_formats import table

from torchrl_llm.errors import MissingExtraError, RewardError, RewardTimeoutError
from torchrl_llm.rewards import math_reward
from torchrl_llm.rewards.math_reward import MATHRewardParser, last_boxed

CASES = cases(__file__)

pytest.importorskip("math_verify")
PAIR = ("answer", "reference")


def test_the_last_complete_box_is_found():
    for text, boxed in [
        (r"\boxed{5}", "5"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{\text{a } b}", r"\text{a } b"),
        (r"\fbox{7}", "7"),
        (r"\boxed 5", "5"),
        (r"\boxed  {5}", "5"),
        (r"\boxed{1} and \boxed{2", "1"),  # the last one never closes
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{3}}", "3"),
        ("no box", None),
        (r"\boxed", None),
        (r"\boxed{{{", None),
        (r"\boxedx{5}", None),
        ("\\boxed{" * 30_000, None),  # half a megabyte, in linear time
    ]:
        assert last_boxed(text) == boxed
        assert MATHRewardParser.extract_boxed(text) == (text.strip() if boxed is None else boxed)


def test_spellings_are_equal_without_a_process(monkeypatch):
    for answer, truth in [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\boxed{\tfrac{1}{2}}", r"\frac12"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"10{,}080".replace("{,}", ","), r"10,\!080"),
        ("$90^\\circ$", "90"),
        (r"90^{\circ}", r"90^\circ"),
        (r"50\%", "50"),
        (r"\$18.90", "18.90"),
        ("x = 5", "5"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("5.", "5"),
        (r"2\quad", "2"),
        ("007", "7"),
        ("1,000", "1000"),
        ("30°", r"30^\circ"),
        ("50 percent", r"50\%"),
        ("5 dollars", r"\$5"),
        ("**5**", "5"),
        ("`5`", "5"),
        ("The answer is $5$.", "5"),
        ("Final answer: 5", "5"),
        ("√2", r"\sqrt{2}"),
        ("2√(3)", r"2\sqrt{3}"),
        ("pi", r"\pi"),
        ("2π", r"2\pi"),
        ("x² + 1", "x^2+1"),
        (r"2516_{8}", "2516_8"),
        ("(−∞, 3] ∪ [5, ∞)", r"(-\infty,3] \cup [5,\infty)"),
    ]:
        monkeypatch.setattr(math_reward, "_same_mathematics", None)
        assert MATHRewardParser.answers_match(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("6", "5"), ("-5", "5"), ("", "5"), ("9" * 3000, "5"), ("5000", "5")]
    + [("2516_7", "2516_8"), (r"1011_{2}", r"1011_{10}")],
)
def test_whole_numbers_differ_without_a_process(monkeypatch, answer, truth):
    monkeypatch.setattr(math_reward, "_same_mathematics", None)
    assert not MATHRewardParser.answers_match(answer, truth)


def test_what_stands_behind_a_subscript_is_an_argument_and_no_second_number():
    for answer, truth, right in [
        (r"\log_2 8", "3", True),
        ("3", r"\log_{2} 8", True),
        (r"\log_2 16", r"\log_3 81", True),
        (r"\log_2 8", "4", False),
        (r"\binom 5 2", "10", True),
        ("3 4", "34", False),
        ("1_2 3", "3", False),
    ]:
        assert MATHRewardParser.answers_match(answer, truth, timeout=60) is right, (answer, truth)


def test_equal_mathematics_is_equal():
    for answer, truth in CASES["equal_mathematics_is_equal"]:
        assert MATHRewardParser.answers_match(answer, truth, timeout=60)


def test_other_mathematics_and_nonsense_are_wrong():
    for answer, truth in [
        ("0.3", r"\frac{1}{3}"),
        ("(2,1)", "(1,2)"),
        ("(1,2)", "[1,2]"),
        (r"\text{odd}", r"\text{even}"),
        ("1 2", "12"),
        ("31/2", r"3 \frac{1}{2}"),
        ("3 1/2", r"\frac{31}{2}"),
        ("x^2", "x^3"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "5"),
        ("1,2,3", "1,2"),
        (r"5 \text{ or } 6", "5"),
        (r"wrong} \boxed{5", "6"),
        ("(((((", "5"),
        ("__import__('os').getpid()", "5"),
        ("\x00", "5"),
        ("\ud800", "5"),
        ("}", "5"),
        ("\\", "5"),
    ]:
        assert not MATHRewardParser.answers_match(answer, truth, timeout=60)


@pytest.mark.parametrize("verdict", ["right", "wrong"])
def test_every_row_of_the_reference_page_is_judged_so_and_the_other_way_around(verdict):
    rows = [row for row in table("math_answers.csv") if row["ours"] == verdict]
    assert len(rows) >= 45
    for row in rows:
        pair = row["answer"], row["reference"]
        # An answer that is broken off is none; a reference never is.
        for answer, truth in [pair] if "boxed" in pair[0] else [pair, pair[::-1]]:
            right = MATHRewardParser.answers_match(answer, truth, timeout=60)
            assert right is (verdict == "right"), (answer, truth)


def test_the_reference_page_has_the_verdicts_of_the_package_alone():
    from math_verify import parse, verify

    for row in table("math_answers.csv"):
        boxed = [row[key] if "boxed" in row[key] else f"\\boxed{{{row[key]}}}" for key in PAIR]
        found, wanted = (parse(text, parsing_timeout=None) for text in boxed)
        right = verify(wanted, found, timeout_seconds=None)
        assert right is (row["math-verify"] == "right"), row


def test_a_comparison_without_end_is_stopped_from_any_thread_and_the_next_one_works():
    assert MATHRewardParser.answers_match("2/4", "1/2", timeout=60)  # the process is up
    caught = []

    def compare():
        try:
            MATHRewardParser.answers_match("9^{9^{9^9}}", "5", timeout=1.0)
        except RewardTimeoutError as error:
            caught.append(error)

    start = time.monotonic()
    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert time.monotonic() - start < 3
    assert len(caught) == 1
    assert MATHRewardParser.answers_match("3/6", "1/2", timeout=60)


def test_a_hostile_answer_makes_an_invalid_reward_and_no_zero(answer):
    from torchrl_llm.envs.datasets.hub_tasks import MATHEnv

    rows = [{"problem": "Half?", "answer": r"\frac{1}{2}"}] * 3
    env = MATHEnv(dataset=rows, num_envs=3, compute_reward=False)
    env = env.append_transform(MATHRewardParser(timeout=4.0))
    texts = ["<answer>0.5</answer>", "<answer>10^{10^{10}}</answer>", "<answer>0.6</answer>"]
    td = env.step(answer(env.reset(), *texts))["next"]
    reward = td["reward"].flatten()
    assert reward[[0, 2]].tolist() == pytest.approx([1.0, 0.1])
    assert reward[1].isnan()
    assert td["reward_valid"].tolist() == [True, False, True]
    assert list(td["error", "type"]) == ["", "RewardTimeoutError", ""]


def test_the_reward_is_one_for_right_a_tenth_for_a_block_zero_for_none():
    parser = MATHRewardParser()
    right = parser.score(r"<think>t</think><answer>$\dfrac12$</answer>", r"\frac{1}{2}")
    assert right == (1.0, True, True, True)
    assert parser.score("<answer>3</answer>", "5") == (0.1, False, True, False)
    assert parser.score("<answer></answer>", "5") == (0.0, False, False, False)
    assert parser.score(r"\boxed{5}", "5") == (0.0, False, False, False)
    assert parser.score("<think><answer>5</answer></think>", "5").reward == 0.0


def test_boxed_answers_count_if_asked_for():
    parser = MATHRewardParser(boxed=True)
    assert parser.score(r"<think>\boxed{1}</think> It is \boxed{5}.", "5") == (1, True, True, True)
    assert parser.score(r"<think>\boxed{5}</think> It is 5.", "5").reward == 0.0
    assert parser.score(r"<answer>4</answer> or \boxed{5}", "5").reward == 0.1


@pytest.mark.parametrize("answer", [None, "", " ", 5])
def test_a_row_whose_own_answer_is_no_text_is_an_error(answer):
    with pytest.raises(RewardError, match="must be a text"):
        MATHRewardParser().score("<answer>5</answer>", answer)


def test_equal_answers_of_a_group_are_compared_once(monkeypatch):
    calls = []

    class Pool:
        def call(self, *arguments, timeout):
            calls.append(arguments)
            return True

    monkeypatch.setattr(math_reward, "_pool", lambda num_workers: Pool())
    for _ in range(4):
        assert MATHRewardParser.answers_match("7/14x", r"\frac{1}{2}x")
    assert len(calls) == 1
    math_reward._same_mathematics.cache_clear()


def test_a_parser_can_be_pickled():
    assert pickle.loads(pickle.dumps(MATHRewardParser(boxed=True))).boxed


def test_without_the_package_the_extra_is_named(monkeypatch):
    real = builtins.__import__
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert builtins.__import__ is real
    with pytest.raises(MissingExtraError, match=r"torchrl_llm\[math\]"):
        MATHRewardParser()


def test_the_processes_load_all_they_need_before_an_answer_and_neither_torch_nor_this_package():
    script = math_reward._CHECK[0]
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('check', {str(script)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert not {'sympy', 'math_verify'} & set(sys.modules)\n"
        f"module.{math_reward._PREPARE}()\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert module.same_mathematics('1/2', '0.5')\n"
        "assert {name.partition('.')[0] for name in sys.modules} == loaded\n"
        "assert not {'torch', 'torchrl', 'torchrl_llm'} & loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
