"""Files that an earlier version has written can still be read, though modules have moved since.

`python -m tests.test_earlier_files` wrote `tests/golden/earlier/`, with the code of commit 4cf0a94 of 2026-11-25.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse

pytestmark = pytest.mark.usefixtures("group")

FOLDER = Path(__file__).parent / "golden" / "earlier"
FACES = ("DataParallel", "DistributedDataParallel")
VALUE = 1 + 2**-12  # bfloat16 rounds the last bit away


def trained(face: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped module with weights 2 after one step, and its optimizer with momentum."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 2 + VALUE)
    model = getattr(dpfuse, face)(net, wire_dtype=torch.bfloat16, error_feedback=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model(torch.full((1, 1), VALUE)).sum().backward()
    optimizer.step()
    return model, optimizer


def write(folder: Path) -> None:
    for face in FACES:
        model, optimizer = trained(face)
        (folder / f"{face}.plan.pickle").write_bytes(pickle.dumps(model.bucket_plan))
        model.bucket_plan.save(folder / f"{face}.plan.json")
        torch.save(model.error_feedback.state_dict(), folder / f"{face}.feedback.pt")
        dpfuse.save_checkpoint(folder / face, model, optimizer, step=1)


@pytest.mark.parametrize("face", FACES)
def test_a_plan_is_the_one_that_was_saved(face: str) -> None:
    plan = trained(face)[0].bucket_plan
    assert pickle.loads((FOLDER / f"{face}.plan.pickle").read_bytes()) == plan
    assert dpfuse.load_plan(FOLDER / f"{face}.plan.json").buckets == plan.buckets


@pytest.mark.parametrize("face", FACES)
def test_what_was_rounded_away_comes_back(face: str) -> None:
    model, _ = trained(face)
    saved = torch.load(FOLDER / f"{face}.feedback.pt", weights_only=True)
    assert [rest.item() for rest in saved["rank0"].values()] == [2**-12]
    model.error_feedback.load_state_dict(saved)
    model.zero_grad()
    model(torch.full((1, 1), VALUE)).sum().backward()
    assert model.error_feedback.state_dict()["rank0"] == {name: torch.tensor([[2**-11]]) for name in saved["rank0"]}


@pytest.mark.parametrize("face", FACES)
def test_a_checkpoint_goes_on(face: str) -> None:
    model, optimizer = trained(face)
    fresh = getattr(dpfuse, face)(nn.Linear(1, 1, bias=False))
    other = torch.optim.SGD(fresh.parameters(), lr=1.0, momentum=0.5)
    assert dpfuse.load_checkpoint(FOLDER / face, fresh, other).step == 1
    assert torch.equal(next(fresh.parameters()), next(model.parameters()))
    assert other.state_dict()["state"][0]["momentum_buffer"] == optimizer.state_dict()["state"][0]["momentum_buffer"]


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    write(FOLDER)
    dist.destroy_process_group()
