"""Draws the floors, a row's life, the bars of the benchmarks, and the cards.

    python docs/draw_pictures.py

The first three are put into the page itself and take its colours, so they follow the reader's
theme; the cards are image files in colours that both themes show. The bars are those of the table
``source/benchmarks.csv``, which the page shows below them.
"""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path

STATIC = Path(__file__).parent / "source/_static"
BENCHMARKS = Path(__file__).parent / "source/benchmarks.csv"
BLUE, ORANGE, GREEN, GREY = "#3b82d6", "#e07b39", "#2f9e6e", "#7d8590"
TEXT = "var(--color-foreground-primary, #7d8590)"
QUIET = "var(--color-foreground-secondary, #7d8590)"
FILL = "var(--color-background-secondary, none)"
BORDER = "var(--color-background-border, #7d8590)"
BODY, CODE = "system-ui, sans-serif", "ui-monospace, monospace"


def svg(width: int, height: int, parts: list[str], title: str) -> str:
    name = html.escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{name}" class="drawing"><title>{name}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def box(x, y, width, height, stroke=BORDER, fill=FILL, radius=7) -> str:
    style = f"fill:{fill};stroke:{stroke};stroke-width:1.4"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" style="{style}"/>'
    )


def text(x, y, words, size=13, colour=TEXT, anchor="start", bold=False, family=BODY) -> str:
    style = f"font:{'600 ' if bold else ''}{size}px {family};fill:{colour}"
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" style="{style}">{html.escape(words)}</text>'
    )


def arrow(path: str, tip: tuple[float, float], turn: int, colour=GREY) -> str:
    """A line with a head at its tip; ``turn`` in degrees, 0 to the right."""
    x, y = tip
    return (
        f'<path d="{path}" style="fill:none;stroke:{colour};stroke-width:1.6"/>'
        f'<path d="M-7 -4L0 0L-7 4" transform="translate({x} {y}) rotate({turn})" '
        f'style="fill:none;stroke:{colour};stroke-width:1.6"/>'
    )


def curve(points: list[tuple[float, float]], colour: str) -> str:
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f"fill:none;stroke:{colour};stroke-width:2.5;stroke-linejoin:round"
    return f'<polyline points="{way}" style="{style}"/>'


# --- The house ------------------------------------------------------------------------------------

FLOORS = [
    ("L4", "recipes", [("recipes algorithms langmarl cli", 0, 380)], ORANGE),
    ("L3", "agents", [("agents gateway: programs of others", 0, 380)], GREEN),
    ("L3", "loops and losses", [("collectors objectives trainers evaluation", 0, 380)], GREEN),
    (
        "L2",
        "actors and their world",
        [("modules weights", 0, 138), ("envs tools rewards sandbox", 150, 230)],
        BLUE,
    ),
    ("L1", "data", [("data: chats, records, buffers", 0, 380)], GREY),
    ("L0", "functional", [("functional: tensors in, tensors out", 0, 380)], GREY),
]


def floors() -> str:
    parts, y = [], 6
    for level, about, rooms, colour in FLOORS:
        parts.append(text(6, y + 15, level, bold=True, colour=colour))
        parts.append(text(32, y + 15, about, bold=True))
        for names, x, width in rooms:
            parts.append(box(6 + x, y + 24, width, 34, stroke=colour))
            parts.append(text(16 + x, y + 46, names, family=CODE, size=12.5))
        y += 72
    parts.append(arrow(f"M404 30V{y - 26}", (404, y - 26), 90))
    parts.append(text(200, y + 6, "a file imports from lower floors only", 12, QUIET, "middle"))
    return svg(420, y + 14, parts, "Five floors of the package; imports go down")


# --- The life of a row ----------------------------------------------------------------------------

SPEAKERS = [("user", GREY, 4), ("model", BLUE, 3), ("tool", ORANGE, 3), ("model", BLUE, 4)]


def tokens(x: float, y: float) -> list[str]:
    """A row of tokens, coloured by who wrote them."""
    parts = []
    for name, colour, count in SPEAKERS:
        middle = x + count * 13
        parts.append(text(middle, y - 7, name, 12, colour, "middle", bold=True))
        for _ in range(count):
            parts.append(box(x + 1, y, 23, 20, stroke=colour, fill=colour, radius=4))
            x += 26
        x += 4
    return parts


def life() -> str:
    parts = [box(20, 8, 160, 62), text(100, 32, "environment", bold=True, anchor="middle")]
    parts.append(text(100, 53, "question, tools, reward", 12, QUIET, "middle"))
    parts += [box(240, 8, 160, 62), text(320, 32, "policy", bold=True, anchor="middle")]
    parts.append(text(320, 53, "ids in, ids out", 12, QUIET, "middle"))
    parts += [arrow("M182 28H236", (236, 28), 0), arrow("M238 50H186", (186, 50), 180)]
    parts += [arrow("M100 72V92", (100, 92), 90), *tokens(12, 122)]
    parts.append(text(12, 162, "log-prob, version and mask stay with each token", 12, QUIET))
    parts.append(arrow("M100 172V192", (100, 192), 90))
    parts += [box(20, 196, 160, 62), text(100, 220, "replay buffer", bold=True, anchor="middle")]
    parts.append(text(100, 241, "joined turns, advantage", 12, QUIET, "middle"))
    parts += [arrow("M182 227H236", (236, 227), 0), box(240, 196, 160, 62)]
    parts.append(text(320, 220, "loss", bold=True, anchor="middle"))
    parts.append(text(320, 241, "on the sampled tokens", 12, QUIET, "middle"))
    parts += [arrow("M320 260V284H100V308", (100, 308), 90), box(20, 312, 160, 62)]
    parts.append(text(100, 336, "optimizer", bold=True, anchor="middle"))
    parts.append(text(100, 357, "checkpoint, metrics", 12, QUIET, "middle"))
    parts += [arrow("M182 343H236", (236, 343), 0), box(240, 312, 160, 62, stroke=BLUE)]
    parts.append(text(320, 336, "weights", bold=True, anchor="middle"))
    parts.append(text(320, 357, "proved to have arrived", 12, QUIET, "middle"))
    parts.append(arrow("M402 343H412V39H404", (404, 39), 180, BLUE))
    return svg(420, 382, parts, "The life of a row, from a question to new weights")


# --- Benchmarks -----------------------------------------------------------------------------------


def bars() -> str:
    """A group of bars for each row of the table; a cell without a number has no bar."""
    with BENCHMARKS.open() as file:
        rows = list(csv.DictReader(file))
    parts, y = [], 6
    for row in rows:
        about, *cells = row.items()
        parts.append(text(6, y + 15, about[1], bold=True))
        y += 24
        sides = [(side, cell) for side, cell in cells if side != "command"]
        figures = [re.match(r"[\d,.]+", cell) for _, cell in sides]
        values = [float(figure[0].replace(",", "")) if figure else None for figure in figures]
        longest = max(value for value in values if value is not None)
        for (side, cell), value, colour in zip(sides, values, (BLUE, ORANGE, GREY), strict=True):
            end = 94
            parts.append(text(86, y + 15, side, 12.5, QUIET, "end"))
            if value is not None:
                length = round(220 * value / longest, 1)
                parts.append(box(94, y + 2, length, 17, colour, colour, 3))
                end += length + 7
            parts.append(text(round(end, 1), y + 15, cell, 12.5, TEXT if value else QUIET))
            y += 23
        y += 14
    return svg(420, y, parts, "Step, memory and a ragged batch: torchrl_llm, TRL and TorchRL")


# --- Cards ----------------------------------------------------------------------------------------


def measured(name: str, width: float, height: float) -> dict[str, list[tuple[float, float]]]:
    """The lines of a measured curve, in the coordinates of a card."""
    with (STATIC / f"curves/{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = max(float(row["x"]) for row in rows)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        x, y = 20 + float(row["x"]) / right * width, 12 + (1 - float(row["y"])) * height
        lines.setdefault(row["line"], []).append((x, y))
    return lines


def axes() -> str:
    return f'<path d="M18 8V114H288" style="fill:none;stroke:{GREY};stroke-width:1.4"/>'


def first_steps() -> list[str]:
    reward, accuracy = measured("quickstart", 260, 100).values()
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ORANGE}"/>' for x, y in accuracy]
    return [axes(), curve(reward, BLUE), *dots]


def data_and_rewards() -> list[str]:
    parts = []
    for row, right in enumerate((True, False, True)):
        y = 10 + 36 * row
        parts += [box(20, y, 96, 28, GREY, "none"), box(122, y, 96, 28, BLUE, "none")]
        parts.append(text(30, y + 19, f"{17 + 8 * row}+{34 - row}", 14, GREY, family=CODE))
        answer = 51 + 7 * row - (0 if right else 9)
        parts.append(text(132, y + 19, str(answer), 14, BLUE, family=CODE))
        colour = GREEN if right else ORANGE
        parts.append(text(252, y + 21, "1" if right else "0", 18, colour, "middle", bold=True))
    return parts


def algorithms() -> list[str]:
    colours = (BLUE, ORANGE, GREEN, "#a66bd3", "#d6455d", "#a98a1e")
    lines = measured("algorithms", 260, 100).values()
    return [axes(), *(curve(line, colour) for line, colour in zip(lines, colours, strict=True))]


def tools_and_environments() -> list[str]:
    parts = [f'<path d="M52 8V112M88 8V112M18 43H122M18 78H122" stroke="{GREY}" stroke-width="2"/>']
    for x, y, mark in ((35, 33, "O"), (70, 68, "X"), (105, 33, "X"), (35, 103, "X"), (70, 33, "O")):
        colour = BLUE if mark == "X" else ORANGE
        parts.append(text(x, y, mark, 22, colour, "middle", bold=True))
    parts += [box(150, 14, 134, 30, BLUE, "none"), box(176, 72, 108, 30, ORANGE, "none")]
    parts.append(text(160, 34, "calc(938*64)", 14, BLUE, family=CODE))
    parts.append(text(230, 92, "60032", 14, ORANGE, "middle", family=CODE))
    return [*parts, arrow("M217 46V68", (217, 68), 90)]


def engines_and_clusters() -> list[str]:
    parts = []
    for lane, (begin, lengths, colour) in enumerate(
        ((18, (78, 78, 78), BLUE), (40, (78, 78, 60), BLUE), (100, (44, 44, 44), GREEN))
    ):
        x = begin
        for length in lengths:
            parts.append(box(x, 14 + 34 * lane, length - 6, 24, colour, colour, 5))
            x += length + (34 if colour == GREEN else 6)
    return parts


def extending() -> list[str]:
    parts = [box(60, 86 - 26 * i, 180, 20, GREY, "none", 5) for i in range(3)]
    parts.append(box(60, 8, 84, 20, BLUE, BLUE, 5))
    style = f"fill:none;stroke:{ORANGE};stroke-width:2;stroke-dasharray:5 4"
    return [*parts, f'<rect x="152" y="8" width="88" height="20" rx="5" style="{style}"/>']


CARDS = (
    first_steps,
    data_and_rewards,
    algorithms,
    tools_and_environments,
    engines_and_clusters,
    extending,
)


def main() -> None:
    (STATIC / "floors.svg").write_text(floors())
    (STATIC / "life_of_a_row.svg").write_text(life())
    (STATIC / "benchmarks.svg").write_text(bars())
    (STATIC / "cards").mkdir(exist_ok=True)
    for card in CARDS:
        name = card.__name__
        (STATIC / f"cards/{name}.svg").write_text(svg(300, 122, card(), name.replace("_", " ")))


if __name__ == "__main__":
    main()
