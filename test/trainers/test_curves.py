import pytest

from torchrl_llm.trainers.curves import (
    Curve,
    axis_limits,
    draw_curves,
    draw_panels,
    terminal_curve,
)

# Name and values of a metric, and both ends of its axis. The page of ``view`` has the same rule.
AXES = {
    "wide": ("train/reward", [0.25, 0.75], (0.25, 0.75)),
    "noise of a metric that is not negative": ("train/kl_approx", [0.0, 1e-7], (0.0, 1e-3)),
    "noise around zero": ("train/loss", [-1e-7, 1e-7], (-5e-4, 5e-4)),
    "noise far from zero": ("train/response_length", [199.5, 200.0], (198.75, 200.75)),
    "one value": ("eval/accuracy", [0.5], (0.4975, 0.5025)),
    "nothing but zeros": ("train/clip_fraction", [0.0, 0.0], (0.0, 1e-3)),
    "a learning rate": ("train/lr", [1e-6, 0.0], (0.0, 1e-6)),
    "a learning rate of 0": ("train/lr", [0.0], (0.0, 1e-3)),
    "a label after the name": ("train/reward, optimizer.lr=1", [0.5, 0.5], (0.4975, 0.5025)),
    "values that are not finite": ("train/reward", [0.0, float("nan"), 1.0], (0.0, 1.0)),
}


@pytest.mark.parametrize("case", AXES)
def test_an_axis_spans_at_least_what_is_more_than_noise(case):
    name, values, expected = AXES[case]
    assert axis_limits(name, values) == pytest.approx(expected, abs=1e-12)


def test_noise_is_a_flat_line_in_a_terminal_and_in_a_picture():
    noise = [0.0, 1e-7, 0.0, 1e-7]
    _, *lines, _ = terminal_curve([1, 2, 3, 4], noise, title="kl", height=6).splitlines()
    drawn = [line.split("|")[1].strip("\u2800") for line in lines]
    assert drawn[-1]
    assert not any(drawn[:-1])
    assert [lines[0].split()[0], lines[-1].split()[0]] == ["0.001", "0"]
    panels = {"train/kl_approx": {"run": Curve([1, 2, 3, 4], noise)}}
    low, high = draw_panels(panels).axes[0].get_ylim()
    assert high - low == pytest.approx(1e-3 * 1.1)  # and matplotlib's own margins


def test_a_rising_curve_rises_on_the_screen():
    steps = list(range(1, 101))
    text = terminal_curve(steps, [s / 100 for s in steps], title="reward", width=20, height=5)
    title, *lines, axis = text.splitlines()
    assert title == "reward"
    assert axis.strip() == "1 .. 100"
    assert lines[0].strip().startswith("1.00")
    assert lines[-1].strip().startswith("0.01")
    # The first dot is in the lowest line on the left, the last one in the highest on the right.
    drawn = [line.split("|")[1] for line in lines]
    assert drawn[-1][0] != "\u2800"
    assert drawn[0][-1] != "\u2800"
    assert drawn[0][0] == "\u2800"


def test_a_constant_a_single_value_and_no_value_can_be_drawn():
    assert "0.50" in terminal_curve([1, 2], [0.5, 0.5], title="t")
    assert "1 .. 1" in terminal_curve([1], [0.5], title="t")
    assert terminal_curve([], [], title="t") == "t"


def test_steps_without_a_valid_reward_are_left_out():
    nan = float("nan")
    known = terminal_curve([1, 3], [0.0, 1.0], title="t")
    assert terminal_curve([1, 2, 3, 4], [0.0, nan, 1.0, nan], title="t") == known
    assert terminal_curve([1, 2], [nan, float("inf")], title="t") == "t"


def test_the_png_is_one(tmp_path):
    path = tmp_path / "c.png"
    draw_curves({"train/reward": ([1, 2], [0.1, 0.2]), "e": ([1], [1])}).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_notebook_shows_the_picture_and_not_a_name():
    figure = draw_curves({"train/reward": ([1, 2], [0.1, 0.2])})
    assert figure._repr_png_().startswith(b"\x89PNG")
