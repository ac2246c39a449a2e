"""The GPT with a sharded optimizer: it learns, has the bits of the plain optimizer, and resumes with the same bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.distributed.processes import ROOT, launch

STEPS, HALF = 16, 8


class Run:
    """What the example prints, and its losses."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.checkpoints = folder / "checkpoints"
        few = ["--steps", STEPS, "--layers", 1, "--every", HALF, "--losses", folder / "losses.json"]
        program = [ROOT / "examples" / "sharded_gpt.py", "--checkpoints", self.checkpoints]
        done = launch("--nproc_per_node", 2, *program, *few, *words, timeout=90, warm_ranks=True)
        assert done.returncode == 0, done.stdout + done.stderr
        self.lines = done.stdout.splitlines()
        self.losses = json.loads((folder / "losses.json").read_text())

    def numbers(self) -> list[int]:
        """The count of the parameters, and the bytes of each rank's states."""
        return [int(number) for number in re.findall(r"\d+", self.lines[-1])]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("sharded"))


@pytest.mark.slow
def test_it_learns_with_the_bits_of_the_plain_optimizer_and_half_of_its_states(sharded: Run, tmp_path: Path) -> None:
    plain = Run(tmp_path, "--plain")
    assert len(sharded.losses) == STEPS
    assert sharded.losses == plain.losses
    assert sharded.losses[-1] < 0.8 * sharded.losses[0]
    count, *whole = plain.numbers()
    assert whole == [8 * count] * 2
    assert sharded.numbers() == [count, *(pytest.approx(4 * count, rel=0.01) for _ in range(2))]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--plain",)], ids=["sharded", "plain"])
def test_it_resumes_with_the_same_bits_also_with_the_plain_optimizer(
    sharded: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(sharded.checkpoints / f"step-{HALF:010}.pt", tmp_path / "checkpoints")
    resumed = Run(tmp_path, *words)
    assert resumed.lines[0] == f"step {HALF} of {STEPS}: resumes"
    assert resumed.losses == sharded.losses[HALF:]
