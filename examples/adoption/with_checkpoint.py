"""torch's distributed checkpoints: one wrapper saves model and optimizer, the other loads them and continues.

    python -m dpfuse.launch --nproc_per_node 2 examples/adoption/with_checkpoint.py

Only the wrapper changes. Each wrapper trains six steps without a break. Each also trains three steps and saves a
checkpoint, and the other wrapper trains three more. All four must end with the same weights and optimizer states, bit
for bit.
"""

from __future__ import annotations

from pathlib import Path

import digits
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from checklist import Checklist, same_bits
from scratch import shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dpfuse

STEPS = 6
BATCH = 64
WRAPPERS = {"dpfuse": dpfuse.DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}


class Training:
    """A wrapped network and its optimizer. The network has no buffers that differ between ranks."""

    def __init__(self, wrapper: str) -> None:
        self.model = WRAPPERS[wrapper](digits.network().eval(), bucket_cap_mb=0.05)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, first: int, last: int) -> None:
        """Train steps `first` up to `last`. Each step has its own batches."""
        pictures, labels = digits.dataset().tensors
        for step in range(first, last):
            start = (step * dist.get_world_size() + dist.get_rank()) * BATCH
            part = slice(start, start + BATCH)
            F.cross_entropy(self.model(pictures[part]), labels[part]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path) -> list[str]:
        """Write a checkpoint. Return the names in it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        return sorted([*model, *optimizer["state"]])

    def load(self, folder: Path) -> None:
        """Read a checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def tensors(self) -> list[Tensor]:
        """Return weights and optimizer states."""
        states = [self.optimizer.state[param] for param in self.model.parameters()]
        return [*self.model.parameters(), *(state[key] for state in states for key in sorted(state))]


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    names, expected = {}, {}
    with shared_folder() as folder:
        for wrapper in WRAPPERS:
            straight = Training(wrapper)
            straight.train(0, STEPS // 2)
            names[wrapper] = straight.save(folder / wrapper)
            straight.train(STEPS // 2, STEPS)
            expected[wrapper] = straight.tensors()
        checklist.check("the wrappers train equally", same_bits(*expected.values()))
        checklist.check(f"both write the same {len(names['torch'])} names", names["dpfuse"] == names["torch"])
        for reader, writer in (("torch", "dpfuse"), ("dpfuse", "torch")):
            resumed = Training(reader)
            resumed.load(folder / writer)
            resumed.train(STEPS // 2, STEPS)
            same = same_bits(resumed.tensors(), expected[reader])
            checklist.check(f"{reader} resumes what {writer} saved, and ends in the same bits", same)
    checklist.end()


if __name__ == "__main__":
    main()
