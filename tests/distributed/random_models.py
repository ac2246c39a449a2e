"""Models made at random, whose gradients are given, and what averaging them must give; for property tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse import BucketPlan

__all__ = [
    "RandomModel",
    "added_in_rank_order",
    "batch",
    "random_sizes",
    "reduced_per_bucket",
    "same_bits",
    "trained",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class RandomModel(nn.Module):
    """Some parameters of random shapes, strides and dtypes, some tied, some frozen.

    Their gradients are what `forward` is given, to the bit.

    Args:
        seed: equal on all ranks.
        dtypes: to choose from.
        most: elements in the largest parameters.
    """

    def __init__(self, seed: int, dtypes: Sequence[torch.dtype] = DTYPES[:1], most: int = 3000) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.params = nn.ParameterList()
        for index in range(rng.integers(1, 12)):
            numel = int(rng.choice([0, 1, 3, 8, int(most ** rng.random()), int(most ** rng.random())]))
            data = torch.zeros(numel, dtype=dtypes[rng.integers(len(dtypes))])
            if numel % 4 == 0 and rng.random() < 0.5:
                data = data.view(4, -1)
                if rng.random() < 0.5:
                    data = data.t()  # dense, in another order than C's
            # The first one trains: a model must have something to average.
            self.params.append(nn.Parameter(data, requires_grad=index == 0 or rng.random() < 0.85))
        if rng.random() < 0.3:
            self.params.append(self.params[0])
        self.uses = [index for index, param in enumerate(self.params) if param.requires_grad]

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        """A loss that has these gradients, one for each of `params`; backward takes `uses` from behind."""
        loss = torch.zeros((), dtype=torch.float64)
        for index in self.uses:
            loss = loss + (self.params[index] * gradients[index]).sum().double()
        return loss


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a bare model by a plan's index."""
    return [param for param in model.parameters() if param.requires_grad]


def batch(model: RandomModel, seed: Iterable[int]) -> list[Tensor]:
    """A gradient for each place in `model.params`, of sizes so different that the order of a sum matters."""
    generator = np.random.default_rng(list(seed))
    gradients = []
    for param in model.params:
        values = np.ldexp(generator.standard_normal(param.numel()), generator.integers(-6, 7, param.numel()))
        gradients.append(torch.from_numpy(values).to(param.dtype).view(param.shape))
    return gradients


def random_sizes(rng: np.random.Generator) -> dict[str, float]:
    """`comm_buffer_size` and `last_comm_buffer_size`, from nothing by way of some elements to everything."""
    sizes = [0, 25, float("inf"), *(2.0 ** rng.integers(2, 14, 3) / 2**20)]
    return {"comm_buffer_size": rng.choice(sizes), "last_comm_buffer_size": rng.choice(sizes)}


def added_in_rank_order(grad: Tensor, size: int) -> Tensor:
    """The definition of `deterministic=True` for one local gradient."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    scaled = (grad.to(wide) * (1 / size)).to(grad.dtype).contiguous()
    parts = [torch.empty_like(scaled) for _ in range(size)]
    dist.all_gather(parts, scaled)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(grad.dtype)


def reduced_per_bucket(plan: BucketPlan, tail: int, grads: Sequence[Tensor], size: int) -> list[Tensor]:
    """The definition of the default: flatten, multiply, all-reduce, for each bucket of the published layout.

    Args:
        plan: that of the backward.
        tail: elements behind the last bucket's slots, which are zeros here.
        grads: local gradients by the plan's index; afterwards the means are in the same order.
        size: number of ranks.
    """
    means = [torch.empty_like(grad) for grad in grads]
    for bucket in plan.buckets:
        dtype = getattr(torch, bucket.dtype)
        flat = torch.zeros(bucket.numel + (tail if bucket is plan.buckets[-1] else 0), dtype=dtype)
        for slot in bucket.slots:
            flat[slot.offset : slot.offset + slot.numel] = in_memory_order(grads[slot.param])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        flat = (flat.to(wide) * torch.tensor(1 / size, dtype=wide)).to(dtype)
        dist.all_reduce(flat)
        for slot in bucket.slots:
            in_memory_order(means[slot.param]).copy_(flat[slot.offset : slot.offset + slot.numel])
    return means


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie."""
    return tensor.as_strided((tensor.numel(),), (1,))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in every bit: NaN payloads and signed zeros count."""
    integer = INTEGER[left.element_size()]
    return left.shape == right.shape and torch.equal(left.contiguous().view(integer), right.contiguous().view(integer))
