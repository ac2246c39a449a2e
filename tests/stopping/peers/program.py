"""One rank of the same training, in one of several ways to stop: `python program.py WAY FOLDER [quiet]`.

With `quiet` the training neither hears signals nor asks whether to stop, and ends by itself after a few steps. Each
rank writes to a file in the folder: its process id, each step, the collectives of some steps, and how it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.operations import Operations

COUNTED = range(5, 15)  # steps whose collectives are counted
SECONDS = 0.005  # of each step, as the forward of a larger model


class Notes:
    """What this rank tells about itself.

    Args:
        folder: of the files.
        quiet: whether the training is to end by itself.
    """

    def __init__(self, folder: Path, quiet: bool) -> None:
        self.folder, self.quiet = folder, quiet
        self._file = open(folder / f"rank-{os.environ['RANK']}.jsonl", "w", buffering=1)  # noqa: SIM115
        self._steps = 0
        self._counting = Operations()

    def tell(self, **facts: Any) -> None:
        """Write one line."""
        print(json.dumps(facts), file=self._file)

    def watch(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Tell of each step of this optimizer."""
        optimizer.register_step_post_hook(self._stepped)
        return optimizer

    def _stepped(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == COUNTED.start:
            self._counting.__enter__()
        elif self._steps == COUNTED.stop:
            self._counting.__exit__(None, None, None)
            self.tell(collectives=len(self._counting.collectives) / len(COUNTED))
        self.tell(step=self._steps)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def batches(quiet: bool) -> Iterator[Tensor]:
    for _ in range(COUNTED.stop + 5) if quiet else count():
        time.sleep(SECONDS)
        yield torch.randn(8, 16)


def by_hand(notes: Notes, *, agree: bool) -> None:
    """torch's DDP, and a flag that a handler sets; with `agree` the ranks reduce it in each step."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    optimizer = notes.watch(adam(model))
    signals: list[int] = []
    if not notes.quiet:
        signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    for batch in batches(notes.quiet):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stops = bool(signals)
        if agree and not notes.quiet:
            flag = torch.tensor(float(stops))
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            stops = bool(flag)
        if stops:
            break
    notes.tell(left=True)
    if dist.get_rank() == 0:
        unfinished = notes.folder / "unfinished"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
        unfinished.rename(notes.folder / "checkpoint.pt")
    dist.destroy_process_group()


def accelerate(notes: Notes) -> None:
    """accelerate with the trigger that its page about early stopping shows."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare = network()
    model, optimizer = accelerator.prepare(bare, notes.watch(adam(bare)))
    if not notes.quiet:
        signal.signal(signal.SIGTERM, lambda number, frame: accelerator.set_trigger())
    for batch in batches(notes.quiet):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if not notes.quiet and accelerator.check_trigger():
            break
    notes.tell(left=True)
    accelerator.save_state(str(notes.folder / "checkpoint"))
    accelerator.end_training()


def lightning(notes: Notes) -> None:
    """Lightning, which handles SIGTERM itself, and its callback that saves when a training is interrupted."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Tensor) -> Tensor:
            return self.network(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return notes.watch(adam(self))

    class Batches(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return batches(notes.quiet)

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[OnExceptionCheckpoint(notes.folder, "checkpoint")],
    )  # fmt: skip
    try:
        trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))
    except SIGTERMException:
        notes.tell(left=True)
        raise


def dpfuse(notes: Notes) -> None:
    """The loop of the guide."""
    import dpfuse

    dpfuse.init_parallel_env()
    if not notes.quiet:
        dpfuse.stop_on_signals("SIGTERM")
    model = dpfuse.DataParallel(network())
    optimizer = notes.watch(adam(model))
    step = 0
    for batch in batches(notes.quiet):
        step += 1
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not notes.quiet and model.stop_requested:
            break
    notes.tell(left=True)
    dpfuse.save_checkpoint(notes.folder, model, optimizer, step=step)


def main(way: str, folder: str, quiet: str = "") -> None:
    notes = Notes(Path(folder), bool(quiet))
    notes.tell(pid=os.getpid())
    ways = {
        "flag": lambda: by_hand(notes, agree=False),
        "all-reduce": lambda: by_hand(notes, agree=True),
        "accelerate": lambda: accelerate(notes),
        "lightning": lambda: lightning(notes),
        "dpfuse": lambda: dpfuse(notes),
    }
    try:
        ways[way]()
    except SystemExit:
        raise
    except BaseException as error:
        notes.tell(raised=f"{type(error).__name__}: {error}"[:200])
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
