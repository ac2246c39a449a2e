"""The methods of transformers' `Trainer` that make its means right over ranks and batches. Imports no transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpfuse import DistributedDataParallel, patch
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError

__all__ = ["TokenWeights"]

IGNORED = -100  # the label of what no loss of torch or transformers counts


class TokenWeights:
    """Placed before a `Trainer` among the bases of a class: `class Tuner(TokenWeights, SFTTrainer)`.

    It wraps the model in `dpfuse.DistributedDataParallel`. Each step has the gradient of the mean over all tokens of
    all ranks and of all batches that are accumulated, as one process with all of them would have: also for models that
    return the mean of a batch, and in the last step of an epoch. accelerate repeats samples there until all batches
    are full; the repeated ones do not count.

    `average_tokens_across_devices` is set to False. The counts of the ranks travel with the gradients, and are not
    gathered before each step. The logged loss is the mean over the ranks of their own means.
    """

    args: Any
    accelerator: Any
    model_wrapped: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.average_tokens_across_devices = False  # True multiplies the loss, and gathers
        self._shares: list[Tensor | float | None] = []  # what multiplies the loss of each batch that was fetched
        self._share: Tensor | float | None = None  # the same of the batch that is trained

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with dpfuse's wrapper."""
        with patch():
            return super().train(*args, **kwargs)  # type: ignore[misc]  # of Trainer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Fetch the batches of a step, and give this rank's gradients the number of their items as a weight.

        Raises:
            DPFuseError: there are several ranks, and another library averages the gradients.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]  # of Trainer
        if not batches:
            return batches, None
        batches[-1], own = self._without_repeated(batches[-1])
        counts = [self._get_num_items_in_batch([batch], device) for batch in batches]  # type: ignore[attr-defined]
        # Such a loss is divided by the items of all batches; other losses are means of one batch.
        of_all = all(count is not None for count in counts)
        if not of_all:
            counts = [_items(batch) for batch in batches]
        if not own:
            counts[-1] = counts[-1] * 0
        total = torch.as_tensor(sum(counts), device=device)
        divisor = total.clamp(min=1)
        self._weigh(total)
        if of_all:
            self._shares = [*[None] * (len(batches) - 1), None if own else 0.0]
            return batches, divisor
        # The Trainer divides these by the number of batches.
        self._shares = [count / divisor.double() * len(batches) for count in counts]
        return batches, None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train one batch, whose loss counts as its items do."""
        self._share = self._shares.pop(0) if self._shares else None
        try:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]  # of Trainer
        finally:
            self._share = None

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """The loss of a batch; in training, times its share of the items."""
        found = super().compute_loss(model, inputs, return_outputs, **kwargs)  # type: ignore[misc]  # of Trainer
        if self._share is None:
            return found
        return (found[0] * self._share, *found[1:]) if return_outputs else found * self._share

    def _weigh(self, items: Tensor) -> None:
        model = getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)
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
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch, True
        if not getattr(getattr(state.active_dataloader, "batch_sampler", None), "even_batches", True):
            return batch, True
        held = {len(value) for value in batch.values() if isinstance(value, (Tensor, list)) and _has_length(value)}
        if len(held) != 1:
            warn_at_user(
                f"the last batch of an epoch has entries of the lengths {sorted(held)}, expected one for each sample: "
                "samples that accelerate has repeated to fill it up count a second time. Pass "
                "dataloader_drop_last=True, or a train_dataset whose length the batch of all ranks divides."
            )
            return batch, True
        (piece,) = held
        own = min(max(state.remainder - self.accelerator.process_index * piece, 0), piece)
        if own == piece:
            return batch, True
        kept = max(own, 1)
        cut = {
            name: value[:kept] if isinstance(value, (Tensor, list)) and _has_length(value) else value
            for name, value in batch.items()
        }
        return cut, own > 0


def _has_length(value: Tensor | list[Any]) -> bool:
    return not isinstance(value, Tensor) or value.dim() > 0


def _items(batch: Any) -> Tensor | int:
    """The items of which a model's loss is the mean, where it takes no count: labels, else samples."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor):
        return labels.ne(IGNORED).sum()
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim())
