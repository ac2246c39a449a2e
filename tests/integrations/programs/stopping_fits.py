"""A signal to the last rank ends a fit of Lightning on all ranks in the same step, and another fit goes on from there.

Arguments: a package, `lightning` or `pytorch_lightning`, and a folder. With the word "rest", the fit only goes on, also
on another number of ranks.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import dpfuse
from dpfuse.data import ResumableBatchSampler

sys.path.append(str(Path(__file__).parent))
from sentences import Bigrams, items, loss_of, sentences, together

PACKAGE, FOLDER = sys.argv[1], Path(sys.argv[2])
ours = importlib.import_module(f"dpfuse.integrations.{PACKAGE}")
pl = importlib.import_module({"lightning": "lightning.pytorch"}.get(PACKAGE, PACKAGE))

SAMPLES, BATCH = 48, 4
BATCHES = SAMPLES // BATCH  # of an epoch, on one rank
USR1, TERM = signal.SIGUSR1, signal.SIGTERM


class Module(pl.LightningModule):
    """Notes the samples of each batch, and sends a signal where it is told to.

    Args:
        sends: the signal, and where: "train 3" is in the forward of the fourth batch of this fit.
    """

    def __init__(self, sends=(0, "")):
        super().__init__()
        self.net = Bigrams()
        self.sends = sends
        self.batches, self.validated, self.ended = [], [], []

    def send(self, where):
        number, place = self.sends
        if place == where and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), number)

    def on_train_start(self):
        self.send("start")

    def training_step(self, batch):
        self.send(f"train {len(self.batches)}")
        self.batches.append((self.current_epoch, batch["number"].tolist()))
        self.trainer.strategy.model.set_gradient_weight(items(batch["labels"]))
        return loss_of(self.net.scores(batch["input_ids"]), batch["labels"])

    def validation_step(self, batch):
        self.send(f"validate {self.global_step}")
        self.validated.append(self.global_step)
        self.log("val_loss", loss_of(self.net.scores(batch["input_ids"]), batch["labels"]), sync_dist=True)

    def on_train_epoch_end(self):
        self.ended.append(self.current_epoch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        each_step = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
        return [optimizer], [each_step]


def training_loader():
    data = sentences(SAMPLES)
    return DataLoader(data, batch_sampler=ResumableBatchSampler(data, BATCH), collate_fn=together, num_workers=0)


def fit(name, module, accumulate=1, resume=False, how=None, loader=None):
    """Fit two epochs. Return the callback, the steps that were trained in all, and the handlers that are left."""
    loader = training_loader() if loader is None else loader
    path = FOLDER / f"{name}.ckpt"
    stop = ours.StopTogether(path)
    saving = pl.callbacks.ModelCheckpoint(FOLDER / name, save_last=True, save_top_k=-1, monitor="val_loss")
    trainer = pl.Trainer(
        strategy="dpfuse",
        accelerator="cpu",
        devices=dist.get_world_size(),
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[stop, saving, pl.callbacks.EarlyStopping("val_loss", patience=9)],
        **({"max_epochs": 2, "min_epochs": 2, "min_steps": 5} if how is None else how),
    )
    held = DataLoader(sentences(BATCH), BATCH, collate_fn=together)
    before = [signal.getsignal(number) for number in (USR1, TERM)]
    trainer.fit(module, loader, held, ckpt_path=path if resume else None)
    assert [signal.getsignal(number) for number in (USR1, TERM)] == before
    dpfuse.forget_stop()
    return stop, trainer.global_step


def of_all(own):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


def trained(batches):
    """The samples of each epoch, of all ranks together."""
    epochs = {}
    for part in of_all(batches):
        for epoch, numbers in part:
            epochs.setdefault(epoch, []).extend(numbers)
    return {epoch: sorted(numbers) for epoch, numbers in epochs.items()}


def same(module, other):
    return all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def interrupted(name, sends, at, accumulate=1, how=None):
    """Compare two fits, of which a signal ends the first and the second goes on, with an undisturbed one.

    Args:
        at: the step in which the signal is to end it.
    """
    undisturbed, first, second = Module(), Module(sends), Module()
    _, steps = fit(f"{name}, undisturbed", undisturbed, accumulate, how=how)
    stop, step = fit(name, first, accumulate, how=how)
    assert stop.stopped
    assert of_all((step, len(first.batches))) == [(at, at * accumulate)] * dist.get_world_size()
    assert at not in first.validated, first.validated
    saved = torch.load(FOLDER / f"{name}.ckpt", weights_only=False)
    assert saved["global_step"] == at
    others = [torch.load(path, weights_only=False)["global_step"] for path in (FOLDER / name).glob("*.ckpt")]
    assert at not in others, others
    stop, step = fit(name, second, accumulate, resume=True, how=how)
    assert not stop.stopped
    assert step == steps
    assert first.batches + second.batches == undisturbed.batches
    assert same(second, undisturbed)
    return first, second


def stopped_twice():
    """At the end of an epoch, and in the next one."""
    undisturbed, parts = Module(), [Module((USR1, f"train {BATCHES // dist.get_world_size() - 1}")), Module(), Module()]
    parts[1].sends = (TERM, "train 2")
    fit("twice, undisturbed", undisturbed)
    for number, part in enumerate(parts):
        stop, _ = fit("twice", part, resume=number > 0)
        assert stop.stopped == (number < 2)
    assert [batch for part in parts for batch in part.batches] == undisturbed.batches
    assert same(parts[-1], undisturbed)


def one_loader_again():
    """A fit that does not go on from a file begins at the first batch, wherever an earlier one has left the loader."""
    first, again, third = Module((USR1, "train 2")), Module(), Module()
    for loader in (training_loader(), pl.utilities.CombinedLoader(training_loader(), "max_size_cycle")):
        for module in (first, again, third):
            module.batches.clear()
            fit("again", module, how={"max_epochs": 1}, loader=loader)
        assert again.batches[:3] == first.batches
        assert again.batches == third.batches
        assert len(again.batches) == BATCHES // dist.get_world_size()


def refused():
    """Without dpfuse's wrapper no rank would hear of a stop."""
    trainer = pl.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ours.StopTogether(FOLDER / "refused.ckpt")],
    )
    before = signal.getsignal(TERM)
    with pytest.raises(dpfuse.DPFuseError, match="which tells all ranks of a stop"):
        trainer.fit(Module(), DataLoader(sentences(SAMPLES), BATCH, collate_fn=together))
    assert signal.getsignal(TERM) == before


def cases():
    per_epoch = BATCHES // dist.get_world_size()
    interrupted("forward", (USR1, "train 2"), at=3)
    interrupted("window", (TERM, "train 2"), at=2, accumulate=2)  # the first batch of a window of two
    interrupted("last", (TERM, f"train {per_epoch - 1}"), at=per_epoch)  # of an epoch
    interrupted("validation", (TERM, f"validate {per_epoch}"), at=per_epoch + 1)
    interrupted("start", (USR1, "start"), at=1)
    interrupted("interval", (USR1, "train 3"), at=4, how={"max_epochs": 2, "val_check_interval": 2})
    interrupted("steps", (USR1, f"train {per_epoch - 1}"), at=per_epoch, how={"max_steps": 2 * per_epoch})
    stopped_twice()
    one_loader_again()
    if dist.get_world_size() > 1:
        refused()


def first():
    """Stop in an epoch, for a fit on another number of ranks."""
    module = Module((USR1, "train 1"))
    stop, _ = fit("rest", module)
    assert stop.stopped
    of_epochs = trained(module.batches)
    if dist.get_rank() == 0:
        torch.save(of_epochs, FOLDER / "trained.pt")
    dist.barrier()


def rest():
    module = Module()
    stop, _ = fit("rest", module, resume=True)
    assert not stop.stopped
    before, after = torch.load(FOLDER / "trained.pt"), trained(module.batches)
    assert before.keys() == {0}
    assert sorted(before[0] + after[0]) == after[1] == [*range(SAMPLES)], (before, after)
    assert module.ended == [0, 1]


def main():
    dpfuse.init_parallel_env()
    {"cases": cases, "first": first, "rest": rest}[sys.argv[3]]()
    print("fine")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
