"""Batch normalisation over all ranks' batches, also on the CPU, where torch has none. Knows nothing of fleet."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.paddle.collectives import sum_over_ranks

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm, which also runs on the CPU: two all-reduces in forward, and two in backward.

    Every sample has the same weight, also if the ranks' batch sizes differ.

    Source: `torch.nn.SyncBatchNorm`, `paddle.nn.SyncBatchNorm`.
    """

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace all BatchNorm layers of `module` in place, and keep parameters and buffers.

        Return `module`, or its replacement if it is a BatchNorm layer itself. With a separate group, the statistics
        need no common order with the all-reduces of the gradients.
        """
        converted: nn.Module = super().convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
        for layer in converted.modules():
            if type(layer) is nn.SyncBatchNorm:
                layer.__class__ = cls
        return converted

    def forward(self, input: Tensor) -> Tensor:
        group = self.process_group
        if input.is_cuda or not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
            output: Tensor = super().forward(input)
            return output
        self._check_input_dim(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        samples = [dim for dim in range(x.ndim) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.ndim)]

        own_count = x.new_tensor([x.numel() // self.num_features])
        sums = sum_over_ranks(torch.cat([x.sum(samples), own_count]), group)
        count = sums[-1].detach()
        if count <= 1:
            raise ValueError(
                f"batch normalisation got {int(count)} values per channel over all ranks; expected at least 2 to train"
            )
        mean = sums[:-1] / count
        centered = x - mean.view(shape)
        # Use the deviations: the difference of large sums would lose precision.
        var = sum_over_ranks(centered.square().sum(samples), group) / count
        if self.track_running_stats:
            self._update_running_stats(mean.detach(), var.detach() * (count / (count - 1)))
        y = centered * torch.rsqrt(var + self.eps).view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, unbiased_var: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), momentum)

    def __getstate__(self) -> dict[str, Any]:
        # A group cannot be copied. A copy uses the default group.
        return {**self.__dict__, "process_group": None}
