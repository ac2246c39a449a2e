"""Figures of the pages are those of the records that they name, and no section has a figure without a source.

A source is a record in bench/results, a command that measures, a test, an output that the tests compare, or the words
that there is no record. `RECORDED` lists the rows that are made from a record again here: if the record changes, the
test fails until the page has its figures.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages, tutorials
from tests.faults.faults import ORDINARY
from tests.faults.job import DDP
from tests.faults.report import OURS, summary

RESULTS = ROOT / "bench/results"
PERFORMANCE = ROOT / "docs/reference/records.md"
RUNS = ["cpu2-2026-11-24-1", "cpu2-2026-11-24-2"]  # of `make bench`
SHARDED, CHECKS, FAULTS = "cpu2-2026-11-24-sharded", "cpu2-2026-11-27-checks", "cpu2-2026-11-30-faults"
DEEPSPEED, NEWER = "cpu2-2026-11-24-step-deepspeed", "cpu2-2026-11-24-step-torch-2.15"
PAIRS = ("pair 1000 tiny", "pair 100 MB large", "pair CNN", "pair transformer")
VIEWS, DROP_IN = "dpfuse views", "dpfuse private"

FIGURE = re.compile(
    r"(?<![\w.,/=(−-])(?:\d+(?:\.\d+)? ?%|[0-3]\.\d\d+(?![\w.])|\d+(?:\.\d+)? (?:µs|ms)\b)"
    r"|\b\d+(?:\.\d+)? times (?:as|faster|smaller|larger)"
)
VERSION = re.compile(r"\b(?:Python|PyTorch|torch) \d+\.\d+(?:\.\d+)?")
SOURCE = re.compile(
    r"[\w./-]+\.json|bench/results|`(?:python|make|pytest) [^`]*`|`tests/[^`]*`|throw-away script|not recorded"
    r"|^\$ python -m |^```output",
    re.MULTILINE,
)
KINDS = "public-programs|stop-peers|nvidia|slow-ranks|slow-links|alternating|cpu2|curves|demo|predictions|torch-suite"
RECORD = re.compile(rf"\b(?:{KINDS})-[\w.-]*\.(?:json|txt)")


def record(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def ratios(cases, what, runs=RUNS):
    """Return the ratios of these cases whose text begins so, of all runs."""
    found = [
        ratio["value"]
        for run in runs
        for ratio in record(run)["ratios"]
        if ratio["case"] in cases and ratio["what"].startswith(what)
    ]
    assert len(found) == len(cases) * len(runs), (cases, what)
    return found


def span(values):
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least}–{most}"


def host(number):
    def over(name, peer):
        cases = [f"host {kind} {number}" for kind in ("chain", "fan", "linear")]
        return span(ratios(cases, f"extra over bare, {name} / {peer}"))

    goal = {10: "0.75", 100: "0.40", 1000: "0.25"}[number]
    return [
        *(over(VIEWS, "DDP default"), goal, over("sketch", "DDP default"), over(VIEWS, "the best peer")),
        *(over(DROP_IN, "DDP default"), over(DROP_IN, "the best peer")),
    ]


def overlap(backward):
    cases = [f"{latency} us, {backward} backward" for latency in (20, 100, 500, 2000)]
    ours = [f"step, {name}" for name in (f"{VIEWS} with", f"{DROP_IN} with", "dpfuse planned / the best peer")]
    return [span(ratios(cases, each)) for each in (*ours, f"step, {VIEWS} / Horovod's rule")]


def against_best(case):
    views, drop_in = (span(ratios([case], f"step, {name} / the best peer")) for name in (VIEWS, DROP_IN))
    return [f"{views} views, {drop_in} drop-in"]


def peers(run, other):
    return [f"{value:.2f}" for case in PAIRS for value in ratios([case], f"step, {DROP_IN} / {other}", [run])]


def deepspeed(stage):
    """Return times over DeepSpeed's, which is no ratio of the record."""
    found = {(row["case"], row["variant"]): row["median"] for row in record(DEEPSPEED)["measurements"]}
    (peer,) = {variant for _, variant in found if f"stage {stage}" in variant}
    return [f"{found[case, DROP_IN] / found[case, peer]:.2f}" for case in PAIRS]


def trained(cases, *peers):
    """Return the times of training steps with a sharded optimizer over the first of these peers that there is."""
    found = []
    for name in TRAINED:
        texts = [f"training step, {name} / {peer}" for peer in peers]
        rows = [row for row in record(SHARDED)["ratios"] if row["case"] in cases and row["what"] in texts]
        assert len(rows) == len(cases), (cases, name)
        found.append(span([row["value"] for row in rows]))
    return found


def over_plain(*cases):
    return trained(cases, "DDP default", "DDP views")  # the record has the faster one


def over_zero(*cases):
    return trained(cases, "DDP with ZeroRedundancyOptimizer")


def networks(backward):
    return over_plain(*(f"network {latency} us, {backward} backward" for latency in (20, 100, 500, 2000)))


def over_default():
    cases = (PAIRS[1], PAIRS[0], *PAIRS[2:])
    return [", ".join(span(ratios([case], f"step, {DROP_IN} / DDP default")) for case in cases)]


TRAINED = ("dpfuse sharded", "dpfuse sharded, stepped in backward")
# The cells of a row after its first cells.
RECORDED = {
    ("10",): lambda: host(10),
    ("100",): lambda: host(100),
    ("1000",): lambda: host(1000),
    ("two ranks, 100 MB in 25 layers, step / best peer ≤ 1.00",): lambda: against_best("pair 100 MB large"),
    ("two ranks, 1000 parameters of 16 elements, / best peer ≤ 0.95",): lambda: against_best("pair 1000 tiny"),
    ("two ranks, CNN of 4 MB, / best peer ≤ 0.95",): lambda: against_best("pair CNN"),
    ("two ranks, transformer of 13 MB, / best peer ≤ 0.95",): lambda: against_best("pair transformer"),
    ("the same four, drop-in / DDP default, no goal",): over_default,
    ("2 backwards",): lambda: overlap(2),
    ("1 backward",): lambda: overlap(1),
    ("½ backward",): lambda: overlap(0.5),
    ("¼ backward",): lambda: overlap(0.25),
    (f"`{DEEPSPEED}.json`", "drop-in / DeepSpeed stage 0"): lambda: deepspeed(0),
    (f"`{DEEPSPEED}.json`", "drop-in / DeepSpeed stage 1"): lambda: deepspeed(1),
    (f"`{NEWER}.json`", "drop-in / DDP default"): lambda: peers(NEWER, "DDP default"),
    (f"`{NEWER}.json`", "drop-in / the fastest peer"): lambda: peers(NEWER, "the best peer"),
    ("AdamW, 1000 tiny", "DDP"): lambda: over_plain("1000 tiny"),
    ("AdamW, 100 MB", "DDP"): lambda: over_plain("100 MB large"),
    ("AdamW, CNN", "DDP"): lambda: over_plain("CNN"),
    ("AdamW, transformer", "DDP"): lambda: over_plain("transformer"),
    ("the four", "DDP with `ZeroRedundancyOptimizer`"): lambda: over_zero(
        "1000 tiny", "100 MB large", "CNN", "transformer"
    ),
    ("Muon, 8 matrices of 512 × 512", "DDP"): lambda: over_plain("Muon"),
    ("AdamW, networks, 2 backwards", "DDP"): lambda: networks("2"),
    ("AdamW, networks, ¼ backward", "DDP"): lambda: networks("0.25"),
}


@pytest.mark.parametrize("begin", RECORDED, ids=" ".join)
def test_a_row_of_the_page_on_performance_is_that_of_its_record(begin):
    (line,) = re.findall(rf"^\| {re.escape(' | '.join(begin))} \| (.*) \|$", PERFORMANCE.read_text(), re.MULTILINE)
    assert line.split(" | ") == RECORDED[begin]()


H100 = "nvidia-h100-80gb-hbm3-2026-11-26-step"
ON_H100 = {
    "ResNet-50, 64 images": "cuda ResNet-50 b64",
    "BERT-large, 8 sequences": "cuda BERT-large b8",
    "2000 parameters of 4 KB": "cuda 2000 x 4 KB",
}


@pytest.mark.parametrize("begin", ON_H100)
def test_what_a_step_adds_on_a_gpu_is_that_of_its_record(begin):
    found = {row["variant"]: row for row in record(H100)["measurements"] if row["case"] == ON_H100[begin]}
    cells = [
        f"{1e3 * (found[name]['min'] - found['bare']['min']):.1f} ({1e3 * found[name]['info']['extra']:.1f})"
        for name in (VIEWS, DROP_IN, "DDP view", "DDP default", "FSDP2 replicate")
    ]
    assert f"| {begin} | {' | '.join(cells)} |" in PERFORMANCE.read_text(encoding="utf-8")


README = (ROOT / "README.md").read_text(encoding="utf-8")
ON_CPU = "cpu2-2026-11-28-step"
STEPS = {
    "one H100, 2000 parameters of 4 KB": (H100, "cuda 2000 x 4 KB"),
    "one H100, ResNet-50, 64 images": (H100, "cuda ResNet-50 b64"),
    "one H100, BERT-large, 8 sequences": (H100, "cuda BERT-large b8"),
    "two ranks on two CPU cores, 1000 parameters of 16 elements": (ON_CPU, "pair 1000 tiny"),
    "two ranks on two CPU cores, a CNN of 4 MB": (ON_CPU, "pair CNN"),
    "two ranks on two CPU cores, a transformer of 13 MB": (ON_CPU, "pair transformer"),
    "two ranks on two CPU cores, 100 MB in 25 layers": (ON_CPU, "pair 100 MB large"),
}


@pytest.mark.parametrize("begin", STEPS)
def test_a_step_of_the_readme_is_that_of_its_record(begin):
    name, case = STEPS[begin]
    found = {row["variant"]: row for row in record(name)["measurements"] if row["case"] == case}

    def over(peers, key):
        return f"{found[DROP_IN][key] / min(found[peer][key] for peer in peers):.2f}"

    modes = [variant for variant in found if variant.startswith(("DDP", "FSDP2"))]
    cells = [f"{over(peers, 'median')} ({over(peers, 'min')})" for peers in (["DDP default"], modes)]
    assert f"| {begin} | {' | '.join(cells)} |" in README


@pytest.mark.parametrize("name", [H100, ON_CPU])
def test_the_readme_says_how_many_goals_a_record_misses(name):
    goals = record(name)["goals"]
    text = " ".join(README.split())
    assert f"`bench/results/{name}.json`; it misses {goals['missed']} of {sum(goals.values())}" in text


def test_the_readme_says_what_few_parameters_cost():
    cases = [f"host {kind} 10" for kind in ("chain", "fan", "linear")]
    found = ratios(cases, "extra over bare, dpfuse private / the best peer", [ON_CPU])
    assert f"adds {min(found):.2f} to {max(found):.2f} times what DDP's fastest mode adds" in README


def test_the_readme_counts_the_faults_of_its_record():
    measurements = record(FAULTS)["measurements"]
    cells = [summary(measurements, side) for side in (DDP, OURS)]
    (row,) = (line for line in README.splitlines() if "played on real ranks" in line)
    assert row.endswith(f"| {' | '.join(cells)} |")
    assert row.startswith(f"| [{len({one['case'] for one in measurements} - ORDINARY)} faults](")
    assert FAULTS in README


def test_both_sides_are_right_in_the_ordinary_uses_that_are_not_counted():
    ends = {}
    for row in record(FAULTS)["measurements"]:
        if row["case"] in ORDINARY:
            ends.setdefault((row["case"], row["variant"] == OURS), []).append(row["info"]["outcome"])
    assert [use for use, found in ends.items() if "right" not in found] == []
    assert f"({len(ORDINARY)}, not counted)" in (ROOT / "docs/wrong/diagnosis.md").read_text()


def test_what_metrics_cost_is_what_was_measured():
    text = " ".join((ROOT / "docs/wrong/diagnosis.md").read_text().split())
    part = {ratio["what"]: ratio["value"] for ratio in record(CHECKS)["ratios"] if ratio["case"] == "step of 5 ms"}
    each, some = (part[f"part of the step that it takes, with metrics{of}"] for of in ("", " of every 20th"))
    assert f"`True` takes {each:.0%} of the step, and `metrics=20` takes {some:.1%}".replace("%", " %") in text


def test_what_the_doctor_has_told_is_what_was_recorded():
    text = " ".join((ROOT / "docs/wrong/doctor.md").read_text().split())
    (name,) = re.findall(r"bench/results/([\w-]+-doctor)\.json", text)
    counts = record(name)["counts"]
    healthy = counts.pop("healthy")
    planted = [case for case in record(name)["cases"] if not case["name"].startswith("healthy: ")]
    named = sum(case["right"] and not case["said"].startswith("nothing") for case in planted)
    assert sum(count["of"] for count in counts.values()) == len(planted) == named + 5
    assert (
        f"It names {named} of {len(planted)} planted mistakes, differences and delays. Of the other five, all" in text
    )
    assert f"It finds nothing wrong in {healthy['right'] // 2} right programs, on two ranks and on three; six" in text
    assert healthy["right"] == healthy["of"]  # on two ranks and on three
    right_programs = [case for case in record(name)["cases"] if case["name"].startswith("healthy: ")]
    assert sum("a remark" in json.dumps(case["said"]) for case in right_programs) == 2 * 6


@pytest.mark.parametrize("version", sorted(path.stem for path in RESULTS.glob("torch-2*.txt")))
def test_the_tests_under_a_release_of_torch_are_those_of_its_record(version):
    page = (ROOT / "docs/reference/environment.md").read_text().replace(",", "")
    last = (RESULTS / f"{version}.txt").read_text().strip().splitlines()[-1]
    counts = re.search(r"\d+ passed \d+ skipped", last.replace(",", "")).group()
    assert f"| {version.removeprefix('torch-')} | {counts} |" in page


def without_code(text):
    return re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def sections_without_source(text):
    """Return the headings of the sections that have a figure, and no source there or above the first section."""
    first, *rest = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    open_sections = [each for each in (first, *rest) if not (SOURCE.search(each) or SOURCE.search(first))]
    with_figure = [each for each in open_sections if FIGURE.search(VERSION.sub("", without_code(each)))]
    return [each.partition("\n")[0] for each in with_figure]


PAGES = [page for page in pages() if page not in tutorials()]  # the tests run those, and compare what is printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(Path(page).relative_to(ROOT)))
def test_no_figure_is_without_a_source(page):
    assert sections_without_source(page.read_text(encoding="utf-8")) == []


def test_a_figure_without_a_source_is_seen():
    page = "# A page\n\nFor torch 2.13.\n\n## One\n\nIt takes 0.81 of DDP's.\n\n## Two\n\n{}\n\n## Three\n\n`0.5 ms`"
    assert sections_without_source(page.format("In 5 ms")) == ["## One", "## Two"]
    assert sections_without_source(page.format("In 5 ms (`bench/results/a.json`).")) == ["## One"]
    assert sections_without_source(page.format("3 times as fast, by a throw-away script")) == ["## One"]


def test_the_regret_of_each_rule_is_that_of_its_record():
    text, found = PERFORMANCE.read_text(encoding="utf-8"), record("regret")
    assert found["machine"]["commit"][:7] in text
    section = text.partition("## Which rule cuts")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| .* \| \d\.\d", line)]
    assert len(lines) == 5
    assert [line for line in lines if line not in found["large models"]["table"]] == []
    for rule in ("dpfuse, default", "torch's DDP, 1 + 25 MB"):
        (line,) = (line for line in found["small models"]["table"] if line.startswith(f"| {rule} |"))
        assert line.split(" | ")[1] in section


def test_every_record_that_a_page_names_exists():
    named = {(page.name, name) for page in pages() for name in RECORD.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 15
    assert [(page, name) for page, name in sorted(named) if not (RESULTS / name).exists()] == []
