"""The model under gradient merging: only its optimizers decide when it communicates."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dpfuse import DPFuseError
from dpfuse.paddle.data_parallel import DataParallel
from dpfuse.paddle.distributed.fleet.gradient_merge import follow_optimizers

__all__ = ["MergedDataParallel"]


class MergedDataParallel(DataParallel):
    """A `DataParallel` that communicates only in the last iteration of its optimizers' cycle.

    Every forward looks up the optimizers again. So model, optimizers and copies of the model may be made in any order.

    Source: `gradient_merge` of `paddle.distributed.fleet.DistributedStrategy`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        follow_optimizers(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward.

        Raises:
            DPFuseError: Gradients are enabled, and no optimizer of `fleet.distributed_optimizer` holds the parameters,
                or the optimizers that hold them differ in their numbers of steps. Also the errors of
                `DataParallel.forward`.
        """
        if torch.is_grad_enabled():
            self._check_cycles()
        return super().forward(*inputs, **kwargs)

    def no_sync(self, enabled: bool = True) -> NoReturn:
        """Raise an error: gradient merging decides when the model communicates.

        Raises:
            DPFuseError: Always.
        """
        raise DPFuseError(
            "no_sync() was called, but gradient_merge decides when this model communicates. Leave no_sync() out, or "
            "leave gradient_merge off and accumulate by hand."
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> NoReturn:
        """Raise an error: the gradients are partial sums of this rank, except inside of the step that ends a cycle.

        Raises:
            DPFuseError: Always.
        """
        raise DPFuseError(
            "clip_grad_norm_() was called, but with gradient_merge the gradients are partial sums of this rank, except "
            "inside of the step that ends a cycle. Clip them there: pass optimizer.register_step_pre_hook() a function "
            "of (optimizer, args, kwargs) that calls torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) and "
            "returns nothing. Or leave gradient_merge off."
        )

    def _check_cycles(self) -> None:
        merges = follow_optimizers(self)
        if not merges:
            raise DPFuseError(
                "gradient_merge is on, but no optimizer of fleet.distributed_optimizer holds this model's parameters, "
                "so its iterations would not be counted. Wrap the optimizer, or leave gradient_merge off."
            )
        if len({merge.position for merge in merges}) > 1:
            raise DPFuseError(
                f"the optimizers over this model are at different iterations: {'; '.join(sorted(map(str, merges)))}. "
                "gradient_merge needs all of them to step in every iteration: step each before the next forward with "
                "gradients enabled, delete the unused ones, or call restart() of each to begin a new cycle."
            )
