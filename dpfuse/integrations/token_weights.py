"""The methods of transformers' `Trainer` that make its means right over ranks and batches. Imports no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from dpfuse import DistributedDataParallel, patch
from dpfuse.engine.torch_private import uncompiled
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError

__all__ = ["TokenWeights"]

IGNORED = -100  # the label of what no loss of torch or transformers counts


class TokenWeights:
    """Placed before a `Trainer` among the bases of a class: `class Tuner(TokenWeights, SFTTrainer)`.

    It wraps the model in `dpfuse.DistributedDataParallel`. Each step has the gradient of the mean over all tokens of
    all ranks and of all batches that are accumulated, as one process with all of them would have: also for models that
    return the mean of a batch, and in the last step of an epoch. accelerate repeats samples there until all batches
    are full; the repeated ones do not count. A batch without the labels of tokens counts as its samples.

    A loss of your own, by `compute_loss` or `compute_loss_func`, is taken for the mean of its batch, unless it is
    given the number of items of all batches. `loss_is_scaled_for_ga = True` says that the losses of a step add up to
    the mean of the rank, and False that each is the mean of its batch, as in transformers. A `training_step` of your
    own has to call that of its base.

    `average_tokens_across_devices` is set to False. The counts of the ranks travel with the gradients, and are not
    gathered before each step. The logged loss is the mean over the ranks of their own means.
    """

    args: Any
    accelerator: Any
    model_wrapped: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.average_tokens_across_devices = False  # True multiplies the loss, and gathers
        self._fetched = 0  # batches of the step
        self._shares: list[Tensor | float | None] = []  # what multiplies the loss of each batch that was fetched

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with dpfuse's wrapper."""
        self._shares = []  # some may be left of a training that was interrupted
        with patch():
            return super().train(*args, **kwargs)  # type: ignore[misc]  # of Trainer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Fetch the batches of a step, and give this rank's gradients the number of their items as a weight.

        Raises:
            DPFuseError: there are several ranks, and another library averages the gradients; a `training_step` has not
                called that of its base.
        """
        if self._shares and len(self._shares) == self._fetched:  # fewer are left of a step that was interrupted
            raise DPFuseError(
                f"none of the {self._fetched} batches of a step was trained by TokenWeights.training_step(), expected "
                f"all: their losses are not weighted. Let the training_step() of {type(self).__name__} call "
                "super().training_step()."
            )
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]  # of Trainer
        if not batches:
            return batches, None
        self._fetched = len(batches)
        batches[-1], own = self._without_repeated(batches[-1])
        counts = [self._get_num_items_in_batch([batch], device) for batch in batches]  # type: ignore[attr-defined]
        of_all = all(count is not None for count in counts)  # whether the loss is given the items of all batches
        if not of_all:
            counts = [_items(batch) for batch in batches]
        if not own:
            counts[-1] = counts[-1] * 0
        total = torch.as_tensor(sum(counts), device=device)
        divisor = total.clamp(min=1)
        self._weigh(total)
        factor = self._factor_of_means(of_all, len(batches))
        if factor is None:
            self._shares = [*[None] * (len(batches) - 1), None if own else 0.0]
        else:
            self._shares = [count / divisor.double() * factor for count in counts]
        return batches, divisor if of_all else None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train one batch, whose loss counts as its items do."""
        share = self._shares.pop(0) if self._shares else None
        step = super().training_step  # type: ignore[misc]  # of Trainer
        if share is None:
            return step(model, inputs, *args, **kwargs)
        # Whatever computes the loss, it goes this way.
        held = vars(self.accelerator)
        before, backward = held.get("backward"), self.accelerator.backward
        held["backward"] = lambda loss, *args, **kwargs: backward(loss * share, *args, **kwargs)
        try:
            return step(model, inputs, *args, **kwargs) * share
        finally:
            del held["backward"]
            if before is not None:
                held["backward"] = before

    def _factor_of_means(self, of_all: bool, batches: int) -> int | None:
        """What the Trainer divides each loss by, if that is the mean of a batch; None if the losses of a step add up.

        As in `Trainer.training_step`, except that a function which is given no number of items returns a mean.
        """
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        function = getattr(self, "compute_loss_func", None)
        if scaled is None:
            scaled = of_all or function is not None
            if not of_all and callable(function):
                return 1
        return None if scaled else batches

    def _weigh(self, items: Tensor) -> None:
        model = uncompiled(self.model_wrapped)
        if isinstance(model, DistributedDataParallel):
            model.set_gradient_weight(items)
        elif self.accelerator.num_processes > 1:
            raise DPFuseError(
                f"{type(self).__name__} trains a {type(model).__name__}, expected that accelerate has wrapped the "
                "model in dpfuse.DistributedDataParallel. Use no other plugin, or transformers' own Trainer."
            )

    def _without_repeated(self, batch: Any) -> tuple[Any, bool]:
        """Take out of the last batch of an epoch what accelerate has put in from the first.

        Returns:
            The batch, and whether some sample in it counts. A rank must train one in any case.
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader:
            return batch, True
        held = [len(entry) for entry in _entries(batch)]
        samples = _samples_of_last(state, self.accelerator.process_index, held)
        if samples is None:
            return batch, True
        own, full = samples
        if own == full or {*held} != {full}:
            if 0 < own < full:
                warn_at_user(
                    f"the last batch of an epoch has entries of the lengths {sorted({*held})}, expected one for each "
                    f"of its {full} samples: those that accelerate has repeated to fill it up count a second time. "
                    "Pass dataloader_drop_last=True, or a train_dataset whose length the batch of all ranks divides."
                )
            return batch, own > 0
        return _first(batch, max(own, 1)), own > 0


def _samples_of_last(state: Any, process: int, held: list[int]) -> tuple[int, int] | None:
    """How many samples of this rank's last batch are in it for the first time, and how many it has.

    Returns:
        None if accelerate repeats none, or if it cannot be known.
    """
    loader = state.active_dataloader
    if getattr(loader, "slice_fn", None) is not None:  # rank 0 deals the batches; it has counted these
        full = held[0] if held else 1
        return min(max(state.remainder - process * full, 0), full), full
    shard = getattr(loader, "batch_sampler", None)
    if shard is None:
        shard = getattr(loader, "sampler", None)  # which may be one of batches
    while shard is not None and not hasattr(shard, "even_batches"):
        shard = getattr(shard, "batch_sampler", None)  # that of a resumed epoch skips batches of another one
    if shard is None or not shard.even_batches or shard.drop_last:
        return None
    inner = shard.batch_sampler
    # The data set may be longer than the sampler, or shorter. Other batch samplers have rules of their own.
    if not isinstance(inner, BatchSampler) or type(inner).__iter__ is not BatchSampler.__iter__:
        return None
    try:
        number = len(inner.sampler)  # type: ignore[arg-type]  # a sampler may have no length
    except TypeError:
        return None
    full = inner.batch_size // shard.num_processes if shard.split_batches else inner.batch_size
    left = number % (full * shard.num_processes)
    return (min(max(left - shard.process_index * full, 0), full), full) if left else None


def _entries(batch: Any) -> list[Tensor | list[Any]]:
    """What of a batch has one element for each sample: tensors and lists of a mapping or a tuple, or a list of samples.

    Those of an unknown kind of batch are none.
    """
    if _of_samples(batch):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return [value for value in values if _has_length(value)]


def _first(batch: Any, number: int) -> Any:
    """The first samples of a batch, whose entries have one element for each."""
    if isinstance(batch, Mapping):
        return {name: value[:number] if _has_length(value) else value for name, value in batch.items()}
    if _of_samples(batch):
        return batch[:number]
    made = getattr(batch, "_make", type(batch))  # of a named tuple
    return made(value[:number] if _has_length(value) else value for value in batch)


def _of_samples(batch: Any) -> bool:
    return isinstance(batch, list) and not all(isinstance(value, Tensor) for value in batch)


def _has_length(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def _items(batch: Any) -> Tensor | int:
    """The items of which a model's loss is the mean, where it takes no count: labels, else samples."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor):
        return labels.ne(IGNORED).sum()
    entries = _entries(batch)
    return len(next((entry for entry in entries if isinstance(entry, Tensor)), entries[0])) if entries else 1
