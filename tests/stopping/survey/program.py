"""Trains with or without a sharded optimizer, in windows of two micro-batches, until it is done or all ranks stop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import dpfuse
from dpfuse.data import ResumableBatchSampler
from tests.stopping.survey.moments import MICRO_BATCHES, arm
from tests.stopping.survey.network import BATCH, EPOCHS, LENGTH, WIDTH, Samples, Unordered
from tests.stopping.survey.notes import Notes, hash_of
from tests.stopping.survey.trials import Trial, run_trial

SAVES_EACH = 2  # steps
CAPS = {"comm_buffer_size": 0.004, "last_comm_buffer_size": 0.001}  # several buckets, and others after the first step


def main(folder: Path, part: str, kind: str, workers: int, trial: Trial | None) -> None:
    """Train."""
    dpfuse.init_parallel_env()
    dpfuse.stop_on_signals()
    torch.manual_seed(100 + dpfuse.get_rank())
    net = Unordered()
    model = dpfuse.DataParallel(net, **CAPS)
    optimizer: torch.optim.Optimizer
    if kind == "sharded":
        optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sampler = ResumableBatchSampler(range(LENGTH), BATCH, seed=1)
    loader = DataLoader(Samples(), batch_sampler=sampler, num_workers=workers, generator=torch.Generator())
    state = {"scheduler": schedule, "sampler": sampler}
    notes = Notes(folder, part)
    step = dpfuse.load_checkpoint(folder / "checkpoints", model, optimizer, **state).step
    if trial is not None:
        arm(trial, net, folder)
    while sampler.epoch < EPOCHS:
        epoch, window, trained = sampler.epoch, 0, []
        for indices, inputs in sampler.track(loader):
            trained += indices.tolist()
            window += 1
            ends = window == MICRO_BATCHES or sampler.seen >= LENGTH
            with nullcontext() if ends else model.no_sync():
                model(inputs).square().mean().backward()
            if not ends:
                continue
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            notes.write(step=step, epoch=epoch, samples=trained)
            window, trained = 0, []
            stops = model.stop_requested
            if stops or step % SAVES_EACH == 0:
                dpfuse.save_checkpoint(folder / "checkpoints", model, optimizer, step=step, **state)
                notes.write(saved=step)
            if stops:
                notes.write(stopped=step, reason=str(model.stop_reason))
                return
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        model.train()
    notes.write(done=step, weights=hash_of(net))


if __name__ == "__main__":
    run_trial(main)
