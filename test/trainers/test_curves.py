from torchrl_llm.trainers.curves import draw_curves, terminal_curve


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
