"""The first screen of the README: what happens under DDP and under dpfuse, the doctor's page, and how to install."""

from __future__ import annotations

import json
import re
from collections import Counter

from tests.docs.pages import ROOT

LINES = 40
SCREEN = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:LINES]
PICTURE = ROOT / "docs/images/doctor.svg"


def test_the_table_comes_first_and_the_picture_and_one_line_to_install_follow():
    places = [
        next(number for number, line in enumerate(SCREEN) if line.startswith(begin))
        for begin in (
            "| What happens |",
            "![What dpfuse doctor says",
            "*A page of `dpfuse doctor`",
            "make wheel && pip install",
        )
    ]
    assert places == sorted(places)
    assert "**Less time**" in "\n".join(SCREEN)


def test_the_first_row_is_counted_in_the_record_that_the_caption_names():
    (name,) = re.findall(r"\(`(bench/results/.*-faults\.json)`\)", "\n".join(SCREEN))
    counts = {"dpfuse": Counter(), "DDP": Counter()}
    for row in json.loads((ROOT / name).read_text())["measurements"]:
        counts[row["variant"]][row["info"]["outcome"]] += 1
    ours, theirs = ({"handled": found["right"] + found["named error"], **found} for found in counts.values())
    (row,) = (line for line in SCREEN if "faults on real processes" in line and line.startswith("|"))
    assert row == (
        f"| {counts['dpfuse'].total()} faults on real processes | {theirs['handled']} are handled, "
        f"{theirs['silent corruption']} give wrong gradients without an error | {ours['handled']} are handled, or name "
        "the rank |"
    )


def test_the_picture_is_small_and_its_conditions_are_those_of_the_caption():
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert "<script" not in text
    assert re.findall(r"https?://[^\s\"]+", text) == ["http://www.w3.org/2000/svg"]
    start = next(number for number, line in enumerate(SCREEN) if line.startswith("*A page of"))
    caption = " ".join(SCREEN[start:]).partition(".*")[0]
    for fact in re.search(r">(\d ranks) on [^<]*, (\d cores); (torch [\d.]+)[^<]*(gloo)", text).groups():
        assert fact in caption
