"""A unit and its loops in the shape of torchtnt: state, callbacks, prefetched batches, accumulation, an average."""

import contextlib
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from weights import say, show


@dataclass
class State:
    loader: DataLoader
    max_epochs: int
    step_in_epoch: int = 0
    steps: int = 0
    is_last_batch: bool = False
    logs: list = field(default_factory=list)


class AutoUnit:
    """Does all of a training step but the loss."""

    def __init__(self, module, accumulation, clip):
        self.module = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 12)
        self.average = AveragedModel(self.module.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.accumulation, self.clip, self.next_batch = accumulation, clip, None

    def app_state(self):
        parts = {"module": self.module.module, "average": self.average, "optimizer": self.optimizer}
        return parts | {"lr_scheduler": self.lr_scheduler}

    def get_next_train_batch(self, state, data_iter):
        batch = self.next_batch if state.step_in_epoch else next(data_iter)
        self.next_batch = next(data_iter, None)
        state.is_last_batch = self.next_batch is None
        return batch

    def train_step(self, state, data_iter):
        batch = self.get_next_train_batch(state, data_iter)
        updates = (state.step_in_epoch + 1) % self.accumulation == 0 or state.is_last_batch
        with contextlib.nullcontext() if updates else self.module.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                loss, outputs = self.compute_loss(state, batch)
            (loss / self.accumulation).backward()
        if updates:
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.average.update_parameters(self.module.module)
            self.lr_scheduler.step()
            state.logs.append((loss.item(), norm.item(), outputs.shape[0]))


class MyUnit(AutoUnit):
    def compute_loss(self, state, batch):
        inputs, targets = batch
        outputs = self.module(inputs)
        return nn.functional.cross_entropy(outputs, targets), outputs

    def eval_step(self, batch):
        inputs, targets = batch
        return self.average.module(inputs).argmax(1).eq(targets).sum()


class Printer:
    def on_train_epoch_end(self, state, unit):
        say(f"logs: {state.logs!r}")
        state.logs.clear()


def train(state, unit, callbacks):
    for epoch in range(state.max_epochs):
        unit.module.train()
        state.loader.sampler.set_epoch(epoch)
        data_iter, state.step_in_epoch, state.is_last_batch = iter(state.loader), 0, False
        while not state.is_last_batch:
            unit.train_step(state, data_iter)
            state.step_in_epoch += 1
            state.steps += 1
        for callback in callbacks:
            callback.on_train_epoch_end(state, unit)


@torch.no_grad()
def evaluate(unit, loader):
    unit.module.eval()
    right = sum(unit.eval_step(batch) for batch in loader)
    dist.all_reduce(right)
    say(f"right: {right.item()}")


def module():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(46, 6), torch.randint(3, (46,)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    unit = MyUnit(module(), accumulation=4, clip=1.0)
    torch.manual_seed(1 + dist.get_rank())
    train(State(loader, int(sys.argv[1])), unit, [Printer()])
    # A new unit goes on where the first one stopped, as after a preemption.
    states = {name: part.state_dict() for name, part in unit.app_state().items()}
    unit = MyUnit(module(), accumulation=4, clip=1.0)
    for name, part in unit.app_state().items():
        part.load_state_dict(states[name])
    train(State(loader, 1), unit, [Printer()])
    evaluate(unit, loader)
    show(unit.module.module, unit.average)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
