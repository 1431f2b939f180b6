"""The page of a run in a real Chromium without a network: fast, whole, deaf to what it shows."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from evaluation.report.pages import HOSTILE, make_row, make_rows

from torchrl_llm.data.enums import MaskReason
from torchrl_llm.evaluation.report import rollout_page
from torchrl_llm.evaluation.report.token_texts import visible
from torchrl_llm.modules import load_tokenizer

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium"),
]
COUNT = 1000
PICTURE = Path(__file__).parents[3] / "docs/source/_static/view.png"


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
    assert "trajectory 10013" in page.text_content(".head h2")
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
    parts = [(folder / f"view.{kind}").read_bytes() for kind in ("html", "css", "js")]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_the_picture_in_the_documentation_is_of_this_page():
    from PIL import Image

    with Image.open(PICTURE) as picture:
        assert picture.text["drawn-by"] == drawn_by(), (
            f"{PICTURE.name} is older than the page; TORCHRL_LLM_DRAW=1 pytest -m full "
            "test/evaluation/report/test_view_in_browser.py draws it"
        )


@pytest.mark.full
def test_the_first_run_of_the_readme_is_viewed_in_two_seconds(browser, tmp_path):
    """Also draws the picture of the documentation, where TORCHRL_LLM_DRAW is set."""
    from PIL import Image, PngImagePlugin

    def command(*words):
        program = [sys.executable, "-m", "torchrl_llm", *words]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    command("train", "grpo", "logging.rollouts=all", "hydra.run.dir=outputs/first-run")
    said = command("view", "outputs/first-run")
    assert int(re.search(r"([\d,]+) rollouts", said)[1].replace(",", "")) >= COUNT
    context = browser.new_context(
        offline=True, viewport={"width": 1280, "height": 900}, device_scale_factor=1.5
    )
    page = context.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.goto((tmp_path / "outputs/first-run/view.html").as_uri())
    page.wait_for_selector("html[data-ready-ms]", state="attached")
    assert page.evaluate("Number(document.documentElement.dataset.readyMs)") <= 2000
    page.select_option("#order", "spread")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("3")
    assert page.locator(".member").count() == 8
    shot = tmp_path / "view.png"
    page.screenshot(path=shot)
    assert said == []
    context.close()
    if os.environ.get("TORCHRL_LLM_DRAW"):
        told = PngImagePlugin.PngInfo()
        told.add_text("drawn-by", drawn_by())
        # A page of few colours: a palette is a third of the size.
        Image.open(shot).convert("RGB").quantize(256).save(PICTURE, pnginfo=told, optimize=True)
