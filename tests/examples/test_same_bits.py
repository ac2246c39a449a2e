"""The example of the same bits: four jobs have one hash, and a hash that differs is an error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import same_bits
import torch
from torch import nn

from tests.distributed.processes import run
from tests.examples.test_fashion_mnist import ROOT, folder  # noqa: F401  # a fixture


@pytest.mark.slow
def test_jobs_of_one_to_four_ranks_have_one_hash(folder: Path) -> None:  # noqa: F811
    words = ["--steps", "3", "--limit", "200", "--data", str(folder)]  # the second epoch begins in the third step
    done = run(ROOT / "examples/same_bits.py", *words, warm_ranks=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"│ (\d) +│ ([\d |]+?) +│ (\w{16}) +│", done.stdout)
    assert [ranks for ranks, _, _ in rows] == ["1", "2", "3", "4"]
    assert [deal for _, deal, _ in rows][1:3] == ["0 1 2 3 | 4 5 6 7", "0 1 2 | 3 4 5 | 6 7"]
    assert len({digest for _, _, digest in rows}) == 1
    assert "all 10 ranks of 4 jobs have the same bits after 3 steps" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("other", [(), (3, 1), (4, 3)])
def test_one_rank_with_another_hash_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: tuple[int, int]
) -> None:
    for ranks in same_bits.JOBS:
        for rank in range(ranks):
            digest = "b" * 16 if other == (ranks, rank) else "a" * 16
            noted = {"hash": digest, "seconds": 1.0, "dealt": [rank], "data": "two numbers"}
            same_bits.notes_of(tmp_path, rank, ranks).write_text(json.dumps(noted))
    assert same_bits.report(tmp_path, 1) == bool(other)
    assert ("FAILED" in capsys.readouterr().out) == bool(other)


def test_the_hash_is_of_every_weight_and_of_the_optimizers_states() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    hashes = [same_bits.hash_of(net, optimizer)]
    for tensor in (net.bias, optimizer.state[net.weight]["exp_avg"]):
        with torch.no_grad():
            tensor.view(-1)[0] += 1
        hashes.append(same_bits.hash_of(net, optimizer))
    assert len(set(hashes)) == 3


def test_an_epoch_has_each_sample_once_and_the_next_one_another_order() -> None:
    step = same_bits.MICRO_BATCHES * same_bits.SIZE
    dealt = [
        torch.cat([same_bits.samples_of(at, number, 2 * step + 5) for number in range(same_bits.MICRO_BATCHES)])
        for at in range(4)
    ]
    for epoch in (torch.cat(dealt[:2]), torch.cat(dealt[2:])):
        assert len(epoch) == 2 * step
        assert len(epoch.unique()) == 2 * step
    assert not torch.equal(dealt[0], dealt[2])


def test_no_layer_of_the_network_has_running_statistics() -> None:
    assert not list(same_bits.network().buffers())
