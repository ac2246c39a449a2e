"""The example that is preempted: two signals in random steps, three numbers of ranks, no sample lost or repeated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import display
import preempted
import pytest
from rich.console import Console

from tests.distributed.processes import run
from tests.examples.test_fashion_mnist import ROOT, folder  # noqa: F401  # a fixture

FEW = ["--epochs", "2", "--limit", "6000"]  # 126 steps


@pytest.mark.slow
def test_two_signals_lose_no_sample_and_repeat_none(folder: Path) -> None:  # noqa: F811
    words = ["--play", "--seed", "1", *FEW, "--data", str(folder)]
    done = run(ROOT / "examples/preempted.py", *words, warm_ranks=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "playing with --seed 1\n" in done.stdout
    assert "each of the 6000 samples was trained once per epoch, in 2 epoch(s)" in done.stdout
    begun = re.findall(r"^ranks: (\d); begins after step (\d+),", done.stdout, re.MULTILINE)
    saved = re.findall(r"^saved after step (\d+): (.*)$", done.stdout, re.MULTILINE)
    assert [ranks for ranks, _ in begun] == ["2", "3", "1"]
    assert [step for _, step in begun] == ["0", *(step for step, _ in saved[:-1])]
    signalled = re.findall(r"^SIGUSR1 to (rank \d) of", done.stdout, re.MULTILINE)
    assert saved[-1] == ("126", "the training is complete")
    assert [why for _, why in saved[:-1]] == [f"{rank} got SIGUSR1" for rank in signalled]
    assert done.stderr.count("the ranks have stopped together; exit code 85") == 2
    assert "Traceback" not in done.stderr


def note(place: Path, rank: int, ranks: int, *batches: tuple[int, list[int]]) -> None:
    lines = [{"pid": 1, "samples": 6}, *([epoch, 1.0 / ranks, numbers] for epoch, numbers in batches)]
    preempted.notes_of(place, rank, ranks).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        ([3, 4], 0, "each of the 6 samples was trained once per epoch, in 1 epoch(s)"),
        ([3], 1, "FAILED: over 1 epoch(s), 1 times a sample was not trained, 0 times more than once"),
        ([3, 4, 0], 1, "FAILED: over 1 epoch(s), 0 times a sample was not trained, 1 times more than once"),
    ],
)
def test_a_sample_that_is_lost_or_repeated_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: list[int], code: int, told: str
) -> None:
    note(tmp_path, 0, 2, (0, [5]))
    note(tmp_path, 1, 2, (0, [2]))
    for rank, numbers in enumerate(([0], [1], last)):
        note(tmp_path, rank, 3, (0, numbers))
    note(tmp_path, 0, 1)
    assert preempted.report(tmp_path, 1) == code
    assert told in capsys.readouterr().out


def test_a_curve_falls_as_its_numbers_do_and_names_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    display.show_curve(Console(), {"2 ranks": [9.0] * 50, "3 ranks": [4.5] * 40, "1 rank": [0.0] * 54})
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0] == f" 9.000 {'•' * 25}"
    assert lines[-2] == f" 0.000 {' ' * 45}{'•' * 27}"
    assert lines[-1] == f"       │2 ranks{' ' * 17}│3 ranks{' ' * 12}│1 rank"
    assert sum("•" in line for line in lines) == 3


def test_a_curve_of_one_number_is_a_point(capsys: pytest.CaptureFixture[str]) -> None:
    display.show_curve(Console(), {"one": [2.0]})
    assert capsys.readouterr().out.count("•") == 1
