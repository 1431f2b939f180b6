"""The page of a run in a real Chromium without a network: fast, whole, deaf to what it shows."""

import hashlib
import math
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from evaluation.report.evaluations import write_evaluation
from evaluation.report.pages import HOSTILE, make_row, make_rows
from trainers.test_curves import AXES

from torchrl_llm.data.enums import MaskReason
from torchrl_llm.evaluation.report import rollout_page
from torchrl_llm.evaluation.report.evaluation_folder import read_evaluation
from torchrl_llm.evaluation.report.page import Table
from torchrl_llm.evaluation.report.token_texts import visible
from torchrl_llm.evaluation.report.two_runs import pair_answers, paired_rows
from torchrl_llm.modules import load_tokenizer

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium"),
]
COUNT = 1000
STATIC = Path(__file__).parents[3] / "docs/source/_static"
PICTURES = ("view", "view_evaluation", "view_two_runs", "view_two_evaluations")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """Opens pages offline, and notes what they say and ask for."""
    folder, contexts = tmp_path_factory.mktemp("pages"), []

    def run(text, **options):
        file = folder / f"{len(contexts)}.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready-ms]", state="attached")
        return page

    yield run
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def thousand(opened):
    """A page of a thousand rollouts, some of them hostile, in the state in which it was opened."""
    tokenizer = load_tokenizer()
    rows = make_rows(tokenizer, COUNT - len(HOSTILE))
    for i, text in enumerate(HOSTILE):
        rows.append(
            make_row(tokenizer, text, text, step=99, group=10_000 + i, trajectory=10_000 + i)
        )
    steps = list(range(1, 100))
    metrics = {
        "train/reward": (steps, [step / 100 for step in steps]),
        "eval/accuracy": ([10, 90], [0.1, 0.9]),
        "train/tokens_trained": (steps, [1000.0 + step for step in steps]),
        "train/tokens_stale": (steps, [float(step % 7) for step in steps]),
        "perf/step_s": (steps, [0.5] * 99),
    }
    return opened(rollout_page(rows, tokenizer=tokenizer, metrics=metrics, title="a run"))


@pytest.fixture
def page(thousand):
    thousand.evaluate("document.querySelector('#filters').reset()")
    thousand.wait_for_selector(f"#count:text-is('{COUNT:,} rollouts')")
    yield thousand
    assert thousand.said == []
    assert thousand.evaluate("window.pwned") is None
    assert len(thousand.asked) == 1  # the file itself


def count(page):
    return page.text_content("#count")


@pytest.mark.full
def test_it_opens_with_a_thousand_rollouts_in_two_seconds(page, record_property):
    ready = page.evaluate("Number(document.documentElement.dataset.readyMs)")
    record_property("ready_ms", ready)
    assert ready <= 2000, f"{ready} ms"
    assert page.title() == "a run"
    # Only what is seen is in the page.
    assert 5 <= page.locator(".item").count() <= 60
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_filters_and_says_how_many_are_left(page):
    page.fill("#step-low", "2")
    page.fill("#step-high", "3")
    assert count(page) == "64 of 1,000 rollouts"
    page.fill("#reward-low", "0.9")
    rewards = page.locator(".item b").all_text_contents()
    assert set(rewards) == {"0.900", "1"}
    page.fill("#step-low", "")
    page.fill("#step-high", "")
    page.fill("#reward-low", "")
    page.select_option("#mask", label="truncated")
    masked = len(range(7, COUNT - len(HOSTILE), 50))
    assert count(page) == f"{masked} of 1,000 rollouts"
    assert page.locator(".item .flag").first.text_content().endswith("masked")
    page.select_option("#mask", "")
    page.select_option("select[data-label=fate]", "truncated")
    assert count(page) == f"{masked} of 1,000 rollouts"
    page.select_option("select[data-label=fate]", "")
    page.fill("#text", "answer 17:")
    assert count(page) == "1 of 1,000 rollouts"
    page.fill("#text", "no such text")
    assert count(page) == "0 of 1,000 rollouts"
    assert page.text_content("#lines") == "No rollout is like that."


def test_it_unfolds_a_conversation_and_colours_its_tokens(page):
    page.fill("#text", "answer 157:")  # masked
    assert "".join(page.locator(".own .t").all_text_contents()).startswith("Answer 157: 32 33 36")
    assert page.text_content(".callout.warn").startswith(
        f"{page.locator('.own .t').count()} sampled tokens not trained: its response was cut"
    )
    colours = {}
    for name in ("none", "log-prob", "advantage", "source", "mask"):
        page.click(f"[data-colour={name}]")
        colours[name] = page.eval_on_selector_all(
            ".own .t", "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
        )
    assert set(colours["none"]) == set(colours["advantage"]) == {"rgba(0, 0, 0, 0)"}  # not trained
    assert len(set(colours["log-prob"])) > 10
    assert len(set(colours["mask"])) == len(set(colours["source"])) == 1
    assert page.get_attribute("[data-colour=ratio]", "disabled") == ""
    assert "no row has the trainer's log-probs" in page.get_attribute(
        "[data-colour=ratio]", "title"
    )
    page.hover(".own .t >> nth=2")
    told = page.text_content("#tip")
    for part in (
        "id",
        "source" + "sampled",
        "turn0",
        "policy version",
        "not trainedits response was",
    ):
        assert part in told


def test_groups_stand_side_by_side_best_first(page):
    page.fill("#text", "answer 17:")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    rewards = [float(text) for text in page.locator(".member b").all_text_contents()]
    assert rewards == sorted(((i * 5 % 11) / 10 for i in range(16, 24)), reverse=True)
    boxes = [box.bounding_box() for box in page.locator(".member").all()[:2]]
    assert boxes[0]["y"] == boxes[1]["y"]
    page.click(".member >> nth=1 >> button")
    assert page.text_content("[aria-selected=true][role=tab]") == "rollout"


def test_a_group_is_named_by_its_prompt_and_its_number_of_answers(page):
    page.fill("#text", "answer 17:")
    page.click("role=tab[name='rollout']")
    assert (
        page.text_content(".head h2")
        == "step 1 \u00b7 \u201cWhat is 2 + 2?\u201d \u00b7 answer 2 of 8"
    )
    page.click("role=tab[name='group of 8']")
    assert (
        page.text_content(".head h2") == "step 1 \u00b7 \u201cWhat is 2 + 2?\u201d \u00b7 8 answers"
    )
    page.click("role=tab[name='rollout']")


def test_it_is_used_by_keys_alone(page):
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    first = page.text_content(".head h2")
    page.keyboard.press("j")
    second = page.text_content(".head h2")
    page.keyboard.press("k")
    assert page.text_content(".head h2") == first != second
    page.focus("#list")
    page.keyboard.press("End")
    last = visible(HOSTILE[-1])[:60]
    assert page.text_content(".head h2") == f"step 99 \u00b7 \u201c{last} \u2026\u201d"
    page.keyboard.press("4")  # no row has ratios
    page.keyboard.press("5")
    assert page.get_attribute("[data-colour=source]", "aria-pressed") == "true"
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#tip")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.press("Escape")


def test_curves_tell_their_values_and_lead_to_their_step(page):
    page.locator(".plot svg").first.hover()
    told = page.text_content("#tip")
    assert told.startswith("step")
    assert page.locator(".cursor[visibility=visible]").count() == page.locator(".card").count() == 3
    page.locator(".plot svg").first.click()
    assert page.input_value("#step-low") == page.input_value("#step-high") == told[4:6]
    page.click("#more summary")
    page.wait_for_selector("#panels-more svg")
    assert page.locator("#panels-more .card").count() == 1
    page.click("#more summary")


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_what_a_model_wrote_is_shown_and_not_run(page, index):
    page.fill("#step-low", "99")
    page.focus("#list")
    page.keyboard.press("Home")
    for _ in range(index):
        page.keyboard.press("ArrowDown")
    text = visible(HOSTILE[index])
    assert page.locator(".item .said").nth(index).text_content() == text[:200]
    shown = "".join(page.locator(".own .t").all_text_contents())
    shown = shown.replace("\u21b5\n", "\n").replace("\u21e5\t", "\t").removesuffix("<|im_end|>")
    # Tokens spell what can be spelled; halves of characters never are tokens.
    assert shown.replace("\u2025", "") == text.replace(r"\ud83d", "?")
    assert page.locator("#detail script, #detail img, #detail svg").count() == 0


def test_even_a_script_that_gets_in_is_refused(opened):
    """The policy holds where textContent would not: markup, scripts, pictures and connections."""
    page = opened(rollout_page(make_rows(load_tokenizer(), 2), tokenizer=load_tokenizer()))
    refused = page.evaluate(
        """async () => {
            const done = [];
            const attempt = async (name, run) => {
                try { await run(); } catch (error) { done.push(name); }
            };
            const body = document.body, script = document.createElement("script");
            const image = "<img src=x onerror=window.pwned=1>";
            await attempt("markup", () => { body.innerHTML += image; });
            await attempt("handler", () => body.setAttribute("onclick", "window.pwned = 2"));
            body.click();
            await attempt("fetch", () => fetch("file:///etc/passwd"));
            await attempt("script", () => { script.text = "window.pwned = 3"; });
            body.append(script);
            body.setAttribute("style", "background: red");
            return done;
        }"""
    )
    assert refused == ["markup", "handler", "fetch", "script"]
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 0, 0)"


def test_it_fits_a_narrow_window_and_follows_the_colours_of_the_reader(opened):
    rows = make_rows(load_tokenizer(), 20)
    text = rollout_page(rows, tokenizer=load_tokenizer(), title="x" * 300)
    backgrounds = []
    for scheme in ("light", "dark"):
        page = opened(text, viewport={"width": 360, "height": 700}, color_scheme=scheme)
        page.keyboard.press("g")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.said == []
    light, dark, dark_too, light_too = backgrounds
    assert (light, dark) == (light_too, dark_too)
    assert light != dark


def test_a_page_without_rollouts_or_tokenizer_is_read_too(opened):
    notice = "This run kept no rollouts."
    page = opened(rollout_page([], metrics={"train/reward": ([1], [0.5])}, notices=[notice]))
    assert page.text_content(".notice >> nth=-1") == notice
    assert not page.is_visible("#rollouts")
    page.locator(".plot svg").click()
    ids = opened(rollout_page(make_rows(load_tokenizer(), 2), metrics={}))
    assert not ids.is_visible("#curves")
    assert ids.locator(".messages .text").last.text_content().startswith("Answer 0:")
    assert ids.locator(".own .t").first.text_content().startswith("⟨")
    assert page.said == ids.said == []


@pytest.mark.parametrize("case", AXES)
def test_an_axis_follows_the_rule_of_the_terminal(opened, case):
    name, values, (low, high) = AXES[case]
    metrics = {name: (list(range(len(values))), values)}
    page = opened(rollout_page([], metrics=metrics))
    if not page.locator("#more").is_hidden():
        page.click("#more summary")
    page.wait_for_selector(".line", state="attached")
    drawn, height = page.evaluate(
        """() => [document.querySelector(".line").getAttribute("d"),
                  document.querySelector(".plot").clientHeight]"""
    )
    known = [value for value in values if math.isfinite(value)]
    if min(known) >= 0 and min(known) < max(known) / 2:
        low = 0.0  # the page begins at zero where that is near
    top, bottom = 8, 20
    expected = [top + (high - v) / (high - low) * (height - top - bottom) for v in known]
    found = [float(point.split(" ")[1]) for point in drawn[1:].split("L")]
    assert found == pytest.approx(expected, abs=0.06)


def test_an_evaluation_is_listed_by_prompt_and_filtered_by_outcome(opened, tmp_path):
    answers = {f"prompt {n}": "rwwi" if n % 2 else "rrrr" for n in range(6)}
    record = read_evaluation(write_evaluation(tmp_path, answers), {})
    page = opened(
        rollout_page(
            record.rows(100), title="t", tables=[Table("T", ["k"], [["1"]])], by_prompt=True
        )
    )
    assert count(page) == "6 prompts"
    assert page.text_content(".head h2") == "\u201cprompt 0\u201d \u00b7 4 answers"
    lines = page.locator(".item").all_text_contents()
    assert lines[0] == "1prompt 04 | 4 | 4 | 44 answers"
    assert lines[1].startswith("0.333prompt 14 | 5 | 5 | 6")  # the invalid one has no reward
    page.select_option("select[data-label='answer is']", "invalid")
    assert count(page) == "3 of 6 prompts"
    page.uncheck("#prompts")
    assert count(page) == "3 of 24 answers"
    assert page.locator(".item .flag.bad").count() == 3
    page.click("role=tab[name='answer']")
    assert page.text_content(".callout.bad") == "TimeoutError: too slow"
    assert page.locator(".messages .text").all_text_contents() == ["prompt 1", "6"]
    assert page.locator("[data-colour]").count() == 0
    assert page.text_content("#tables .card") == "Tk1"
    page.click("#filters [type=reset]")
    page.wait_for_selector("#count:text-is('6 prompts')")
    assert page.said == []


def test_two_evaluations_stand_side_by_side(opened, tmp_path):
    both = [
        read_evaluation(write_evaluation(tmp_path / name, answers), {})
        for name, answers in {"a": {"p": "r", "q": "w"}, "b": {"p": "r", "q": "r"}}.items()
    ]
    pairs, _ = pair_answers(*both)
    runs = {"A a": {"train/reward": ([1, 2], [0.0, 1.0])}, "B b": {"train/reward": ([1], [0.5])}}
    rows = paired_rows(pairs, list(runs), 100)
    page = opened(rollout_page(rows, runs=runs, by_prompt=True))
    lines = page.locator(".item").all_text_contents()
    assert lines == ["+1q5 \u2192 4A wrong, B right", "0p4 \u2192 4both right"]
    assert page.locator(".sides h3").all_text_contents() == ["A a", "B b"]
    assert page.locator(".sides .text").all_text_contents() == ["5", "4"]
    boxes = [box.bounding_box() for box in page.locator(".member").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    assert page.locator(".card .series").all_text_contents() == ["A a 1", "B b 0.500"]
    colours = page.eval_on_selector_all(
        ".line", "lines => lines.map(l => getComputedStyle(l).stroke)"
    )
    assert len(set(colours)) == 2
    page.select_option("select[data-label=change]", "both right")
    assert count(page) == "1 of 2 prompts"
    assert page.said == []


@pytest.mark.full
def test_the_longest_rollout_is_shown_in_parts(opened):
    tokenizer = load_tokenizer()
    rows = [
        make_row(tokenizer, "a", "1 " * 3200, mask=int(MaskReason.OVERLONG), trajectory=i)
        for i in range(2)
    ]
    page = opened(rollout_page(rows, tokenizer=tokenizer))
    total = len(rows[0]["tokens", "full"])
    assert page.locator(".t").count() == 6000
    button = page.locator(".tokens button")
    while button.count():
        button.click()
    assert page.locator(".t").count() == total


# -- the picture in the documentation -----------------------------------------------------------


def drawn_by():
    """Digest of what draws the page."""
    folder = files("torchrl_llm.evaluation.report")
    names = ("view.html", "view.css", "view.js", "curves.js")
    parts = [(folder / name).read_bytes() for name in names]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_in_the_documentation_is_of_this_page(name):
    from PIL import Image

    with Image.open(STATIC / f"{name}.png") as picture:
        assert picture.text["drawn-by"] == drawn_by(), (
            f"{name}.png is older than the page; TORCHRL_LLM_DRAW=1 pytest -m full "
            "test/evaluation/report/test_view_in_browser.py draws it"
        )


TRAIN = ("train", "grpo", "train.max_steps=40")
ASKED = ("tasks=[arithmetic]", "inference_model.max_tokens=6")
SAMPLED = ("inference_model.temperature=1", "eval.repeats=8", "eval.num_prompts=256")
# Folder to the command of the pages that writes it, and the folders that it reads.
COMMANDS = {
    "first-run": ((*TRAIN, "logging.rollouts=all"), ()),
    "low-lr": ((*TRAIN, "optimizer.lr=1e-4"), ()),
    "sampled": (("evaluate", *ASKED, *SAMPLED), ()),
    "before": (("evaluate", *ASKED), ()),
    "after": (("evaluate", *ASKED, "model.name=outputs/first-run"), ("first-run",)),
}
# Picture to the folders that it shows, and how many rollouts or answers.
SHOWN = {
    "view": (("first-run",), "1,792 rollouts"),
    "view_evaluation": (("sampled",), "2,000 answers"),
    "view_two_runs": (("first-run", "low-lr"), "two runs"),
    "view_two_evaluations": (("before", "after"), "1,024 answers"),
}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs commands of the pages in one folder, each that writes a folder once."""
    place = tmp_path_factory.mktemp("commands")

    def run(*words):
        program = [sys.executable, "-m", "torchrl_llm", *words]
        done = subprocess.run(program, cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def make(name):
        words, needed = COMMANDS[name]
        if not (place / "outputs" / name).is_dir():
            for other in needed:
                make(other)
            run(*words, f"hydra.run.dir=outputs/{name}")

    run.place, run.make = place, make
    return run


@pytest.mark.full
@pytest.mark.parametrize("name", SHOWN)
def test_a_page_of_the_documentation_opens_in_two_seconds(name, browser, command):
    """Also draws its picture, where TORCHRL_LLM_DRAW is set."""
    from PIL import Image, PngImagePlugin

    folders, told = SHOWN[name]
    for folder in folders:
        command.make(folder)
    said = command("view", *(f"outputs/{folder}" for folder in folders), "-o", f"{name}.html")
    assert told in said
    ready = []
    for width, height in ((400, 800), (1280, 900)):
        window = {"width": width, "height": height}
        context = browser.new_context(offline=True, viewport=window, device_scale_factor=1.5)
        page = context.new_page()
        page.on("console", lambda message: pytest.fail(message.text))
        page.goto((command.place / f"{name}.html").as_uri())
        page.wait_for_selector("html[data-ready-ms]", state="attached")
        ready.append(page.evaluate("Number(document.documentElement.dataset.readyMs)"))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if name == "view":
            page.select_option("#order", "spread")
            page.keyboard.press("Escape")
            page.keyboard.press("g")
            page.keyboard.press("3")
            assert page.locator(".member").count() == 8
        shot = command.place / f"{name}.png"
        page.screenshot(path=shot)
        context.close()
    if os.environ.get("TORCHRL_LLM_DRAW"):
        about = PngImagePlugin.PngInfo()
        about.add_text("drawn-by", drawn_by())
        # A page of few colours: a palette is a third of the size.
        picture = Image.open(shot).convert("RGB").quantize(256)
        picture.save(STATIC / f"{name}.png", pnginfo=about, optimize=True)
    assert max(ready) <= 2000, ready
