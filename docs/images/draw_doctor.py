"""Draws what the page of `dpfuse doctor` shows, from its report: python docs/images/draw_doctor.py REPORT.

REPORT is `report.json`. The answers, the losses and the parts of a step are those of the page, and its own code draws
the charts. The speed is left out where runs of one kind differ by more than 10 %, as on a machine with other work. The
report of the picture is of the language model among the programs of the tests:

    cd tests/commands/programs && dpfuse doctor --ranks 2 --out report language_model.py settings.py

where `settings.py` holds `steps, width = 100, 128`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from html import escape
from pathlib import Path

from dpfuse.commands.doctor.charts import bars, lines
from dpfuse.commands.doctor.runs import TITLES
from dpfuse.commands.doctor.summary import ANSWERS, WORDS

PICTURE = Path(__file__).parent / "doctor.svg"
WIDTH, GAP, COLUMN = 900, 24, 414
QUIET = 0.1  # of the speed, by which runs of one kind may differ
COLOURS = ("#3568c8", "#d9822b", "#2f9e6e", "#8e5bc0", "#d45d79", "#9aa3ad")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #445; } .title { font-size: 20px; font-weight: 600; fill: #1b1f24; }
.answer { font-size: 18px; font-weight: 600; fill: #1a7f4b; } .bad { fill: #b3261e; } .unknown { fill: #667; }
.card { fill: none; stroke: #d8dce2; } .grid { stroke: #d8dce2; } .line { fill: none; stroke-width: 1.5; }
.line.c0 { stroke-width: 5; opacity: 0.45; }
.mark { stroke: #b3261e; } text.mark { fill: #b3261e; stroke: none; }
"""


def main(path: str) -> None:
    """Draw the report at `path`."""
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    speed, numbers = report["speed"], report["numbers"]
    count = len(report["findings"])
    quiet = speed["noise"] is not None and speed["noise"] <= QUIET
    fast = speed["short"] if quiet else "runs differ too much"
    answers = [
        ("same numbers?", ANSWERS[numbers["result"]], "" if numbers["result"] in ("equal", "close") else "bad"),
        ("how fast?", fast, "" if quiet else "unknown"),
        (
            "what is wrong?",
            f"{count} finding{'s' * (count != 1)}" if count else "nothing found",
            "bad" if count else "",
        ),
    ]
    parts = [f'<text x="{GAP}" y="40" class="title">dpfuse doctor</text>']
    width = (WIDTH - 4 * GAP) / 3
    for place, (title, text, kind) in enumerate(answers):
        x = GAP + place * (width + GAP)
        parts.append(f'<rect x="{x}" y="58" width="{width}" height="62" rx="8" class="card"/>')
        parts.append(f'<text x="{x + 14}" y="82">{escape(title)}</text>')
        parts.append(f'<text x="{x + 14}" y="107" class="answer {kind}">{escape(text)}</text>')
    losses: dict[str, list[float]] = {}
    for run in report["runs"]:
        title = run["title"].partition(", ")[2]
        if title in (TITLES["torch"], TITLES["dpfuse"]):
            losses.setdefault(title, [math.nan if value is None else value for value in run["losses"]])
    shown = [part for part in WORDS if any(one["parts"][part] for one in speed["timings"])]
    times = {}
    for one in speed["timings"]:
        step = sum(one["parts"].values())
        times[one["run"]] = {WORDS[part]: 100 * one["parts"][part] / step for part in shown}
    parts += _placed(lines(losses, label="loss of rank 0"), GAP, 140)
    parts += _placed(bars(times, label="where the time of a step goes", unit="%"), WIDTH - GAP - COLUMN, 140)
    machine, versions = report["machine"], report["versions"]
    facts = f"{report['ranks']} ranks on {machine['cpu']}, {machine['cores']} cores; torch {versions['torch']}, gloo; "
    facts += f"two runs of one kind differ by {speed['noise']:.0%}; drawn from the report"
    parts.append(f'<text x="{GAP}" y="432">{escape(facts)}</text>')
    colours = "".join(
        f".line.c{number} {{ stroke: {colour}; }} .bar.c{number}, .key.c{number} {{ fill: {colour}; }}\n"
        for number, colour in enumerate(COLOURS)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 450" width="{WIDTH}" height="450">'
    background = f'<rect width="{WIDTH}" height="450" fill="#fff"/>'
    PICTURE.write_text(f"{head}<style>{STYLE}{colours}</style>{background}{''.join(parts)}</svg>\n", encoding="utf-8")


def _placed(chart: str, x: float, y: float) -> list[str]:
    """Return a chart of the page with its label and legend, at a place of the picture."""
    label = re.search(r"<figcaption>(.*?)</figcaption>", chart)
    drawing = re.search(r'<svg viewBox="0 0 (\d+) (\d+)".*?>(.*)</svg>', chart)
    assert label is not None
    assert drawing is not None
    wide, high, inside = int(drawing[1]), int(drawing[2]), drawing[3]
    parts = [f'<text x="{x}" y="{y + 12}">{label[1]}</text>']
    parts.append(
        f'<svg x="{x}" y="{y + 22}" width="{COLUMN}" height="{COLUMN / wide * high}" viewBox="0 0 {wide} {high}">'
        f"{inside}</svg>"
    )
    left, top = x, y + 48 + COLUMN / wide * high
    for number, name in enumerate(re.findall(r"</i>(.*?)</li>", chart)):
        if left + 8 * len(name) > x + COLUMN:
            left, top = x, top + 20
        parts.append(f'<rect x="{left}" y="{top - 10}" width="11" height="11" rx="2" class="key c{number}"/>')
        parts.append(f'<text x="{left + 16}" y="{top}">{name}</text>')
        left += 34 + 7 * len(name)
    return parts


if __name__ == "__main__":
    main(*sys.argv[1:])
