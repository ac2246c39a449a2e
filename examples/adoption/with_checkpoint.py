"""torch's distributed checkpoints: what one wrapper saves, the other loads, optimizer included, and training goes on.

    python -m dpfuse.launch --nproc_per_node 2 examples/adoption/with_checkpoint.py

Nothing changes but the wrapper. Six steps at a stretch with either wrapper are compared with three steps, a checkpoint,
and three more behind the other wrapper: all four must end in the same weights and optimizer states, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import digits
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from scratch import shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from verdict import Verdict, same_bits

import dpfuse

STEPS = 6
BATCH = 64
WRAPPERS = {"dpfuse": dpfuse.DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}


class Training:
    """A wrapped network without buffers that differ from rank to rank, and its optimizer."""

    def __init__(self, wrapper: str) -> None:
        self.model = WRAPPERS[wrapper](digits.network().eval(), bucket_cap_mb=0.05)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, first: int, last: int) -> None:
        """Steps `first` up to `last`, each with batches of its own."""
        pictures, labels = digits.dataset().tensors
        for step in range(first, last):
            start = (step * dist.get_world_size() + dist.get_rank()) * BATCH
            part = slice(start, start + BATCH)
            F.cross_entropy(self.model(pictures[part]), labels[part]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path) -> list[str]:
        """Write a checkpoint; the names in it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        return sorted([*model, *optimizer["state"]])

    def load(self, folder: Path) -> None:
        """Read one."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def tensors(self) -> list[Tensor]:
        """Weights and optimizer states."""
        states = [self.optimizer.state[param] for param in self.model.parameters()]
        return [*self.model.parameters(), *(state[key] for state in states for key in sorted(state))]


def main() -> None:
    dpfuse.init_parallel_env()
    verdict = Verdict()
    names, expected = {}, {}
    with shared_folder() as folder:
        for wrapper in WRAPPERS:
            straight = Training(wrapper)
            straight.train(0, STEPS // 2)
            names[wrapper] = straight.save(folder / wrapper)
            straight.train(STEPS // 2, STEPS)
            expected[wrapper] = straight.tensors()
        verdict.check("the wrappers train alike", same_bits(*expected.values()))
        verdict.check(f"both write the same {len(names['torch'])} names", names["dpfuse"] == names["torch"])
        for reader, writer in (("torch", "dpfuse"), ("dpfuse", "torch")):
            resumed = Training(reader)
            resumed.load(folder / writer)
            resumed.train(STEPS // 2, STEPS)
            same = same_bits(resumed.tensors(), expected[reader])
            verdict.check(f"{reader} resumes what {writer} saved, and ends in the same bits", same)
    verdict.end()


if __name__ == "__main__":
    main()
