"""accelerate with a sharded optimizer: prepare the model first, then make the optimizer of it.

    python -m dpfuse.launch --nproc_per_node 2 examples/adoption/with_sharded_accelerate.py

The lines are [1] to [4]. The program accumulates, has a schedule, clips, saves its state and loads it. It also runs
with torch's DDP and the plain optimizer. Losses and weights must be equal bit by bit, except where gradients are
clipped: the last digit of a norm depends on the order of its sum.
"""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from pathlib import Path

import digits
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from checklist import Checklist, same_bits, state_of
from scratch import shared_folder
from torch import Tensor
from torch.utils.data import DataLoader

import dpfuse

ACCUMULATE = 2
LARGEST = 0.5  # norm of the gradients, where the program clips


class Training:
    """Model, optimizer, loader and schedule, as accelerate prepares them."""

    def __init__(self, *, sharded: bool, clip: float) -> None:
        context: AbstractContextManager[object] = dpfuse.patch() if sharded else contextlib.nullcontext()  # [1]
        with context:
            self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
            set_seed(0)
            self.model = self.accelerator.prepare(digits.network())  # [2] the model alone
        if sharded:
            optimizer = dpfuse.ShardedOptimizer(self.model, torch.optim.AdamW, lr=0.01)  # [3] of the wrapped model
        else:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        loader = DataLoader(digits.dataset(), batch_size=32)
        self.optimizer, self.schedule, self.loader = self.accelerator.prepare(optimizer, schedule, loader)
        self.sharded, self.clip = sharded, clip

    def epoch(self) -> list[Tensor]:
        """Train an epoch. Return the losses, and the norms before clipping."""
        losses, norms = [], []
        for pictures, labels in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(pictures), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.sharded:
                    norms.append(self.model.clip_grad_norm_(self.clip))  # [4] not accelerator.clip_grad_norm_
                elif self.accelerator.sync_gradients:
                    norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return [torch.stack(losses), torch.stack(norms)]


def resumed(folder: Path) -> list[Tensor]:
    """Return the losses of a second epoch: after a first one, and in another training that has loaded its state."""
    first, second = (Training(sharded=True, clip=math.inf) for _ in range(2))
    first.epoch()
    first.accelerator.save_state(str(folder))
    first.accelerator.wait_for_everyone()  # rank 0 writes the files
    second.accelerator.load_state(str(folder))
    return [training.epoch()[0] for training in (first, second)]


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    for clip in (math.inf, LARGEST):
        results = []
        for sharded in (True, False):
            training = Training(sharded=sharded, clip=clip)
            assert isinstance(training.model, dpfuse.DistributedDataParallel) == sharded
            results.append([*training.epoch(), *state_of(training.model)])
        (losses, norms, *weights), (their_losses, their_norms, *their_weights) = results
        close = torch.allclose(norms, their_norms, rtol=1e-5)
        if clip == math.inf:
            same = same_bits([losses, *weights], [their_losses, *their_weights])
            checklist.check(f"{len(losses)} losses and the weights equal those of DDP and AdamW bitwise", same)
            checklist.check("the norms are close to torch's", close)
        else:
            assert (norms > LARGEST).any()
            checklist.check(
                "clipped, losses and norms are close to them", close and torch.allclose(losses, their_losses)
            )
    with shared_folder() as folder:
        checklist.check(
            "a state that accelerate saved resumes with the same bits",
            same_bits(*([losses] for losses in resumed(folder))),
        )
    checklist.end()


if __name__ == "__main__":
    main()
