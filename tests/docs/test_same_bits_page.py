"""What the page about equal bits shows: its program with accelerate, and its tables of bytes and of exclusions."""

from __future__ import annotations

import re
from importlib.util import find_spec
from math import ceil, log2
from pathlib import Path

import pytest

from dpfuse.engine.micro_batches import MicroBatches
from dpfuse.exclusions import EXCLUSIONS
from tests.distributed.processes import launch
from tests.docs.pages import ROOT, blocks_of

PAGE = ROOT / "docs/train/same_bits.md"
TEXT = PAGE.read_text(encoding="utf-8")


def after_the_change() -> str:
    """The program of the page with accelerate, with its added lines and without those that are taken out."""
    (block,) = (block.text for block in blocks_of(PAGE) if block.language == "diff")
    return "".join(f"{line[1:]}\n" for line in block.splitlines() if not line.startswith("-"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_program_with_accelerate_prints_the_same_hash_on_one_to_three_ranks(tmp_path: Path) -> None:
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed; `make test-all` does it")
    (tmp_path / "train.py").write_text(after_the_change(), encoding="utf-8")
    printed = set()
    for ranks in (1, 2, 3):
        done = launch("--nproc_per_node", ranks, "train.py", folder=tmp_path, warm_ranks=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (digest,) = re.findall(r"^[0-9a-f]{64}$", done.stdout, re.MULTILINE)
        printed.add(digest)
    assert len(printed) == 1
    assert (tmp_path / "trained").is_dir()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_table_of_bytes_is_that_of_the_deal(ranks: int) -> None:
    deal = MicroBatches(8, ranks)
    sums = max(len(deal.subtrees(rank)) for rank in range(ranks))
    sent, ordered = ((ranks - 1) / ranks * 4 * (count + 1) for count in (sums, 1))
    row = [
        str(ranks),
        ", ".join(str(len(deal.of(rank))) for rank in range(ranks)),
        str(sums),
        *(f"{nbytes:.2f}".replace(".00", ".0") if nbytes else "0" for nbytes in (sent, ordered)),
    ]
    assert f"| {' | '.join(row)} |" in TEXT


def test_the_numbers_of_sums_in_memory_are_those_of_the_deal() -> None:
    most = [max(map(MicroBatches(8, ranks).most_nodes, range(ranks))) for ranks in (1, 2, 3, 4)]
    assert most == [3, 2, 2, 1]
    assert "3 for 8 micro-batches on one rank, 2 on two or three ranks, 1 on four" in TEXT
    for count in range(2, 49):
        assert all(MicroBatches(count, n).most_nodes(r) <= ceil(log2(count)) for n in range(1, count) for r in range(n))
    received = sum(len(MicroBatches(8, 3).subtrees(rank)) for rank in range(3)) / 3
    assert f"{received:.2f} in the row of three ranks" in TEXT


def test_the_page_names_all_that_the_option_excludes() -> None:
    said = {
        "wire": "`wire_dtype`",
        "narrow wire": "`wire_dtype`",
        "auto": '`plan="auto"`',
        "hook": "communication hooks",
        "weight": "`set_gradient_weight`",
        "DTensor": "DTensors",
    }
    names = [name for row in EXCLUSIONS if row.one == "fixed_micro_batches" for name in row.others]
    assert len(names) > 10
    refused = "\n".join(line for line in TEXT.splitlines() if "| refused" in line)
    for name in names:
        assert re.search(said.get(name, rf"`(?:dpfuse\.)?{name}(?:\(\))?`"), refused), name
