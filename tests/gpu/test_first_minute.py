"""The first minute on a GPU: each way of use takes a few steps, and its parameters are those of the bare module.

`tests/pretended_gpu/ways.py` has the ways. With one rank, the mean of the gradients is the rank's own gradient.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.pretended_gpu.ways import WAYS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 6
EXACT = {"rtol": 0.0, "atol": 2e-5}  # a sharded AdamW does not fuse its sums as the fused one does; a step is 1e-3
ROUNDED = {"rtol": 0.0, "atol": 5e-4}  # gradients travel with 16 or 8 bits
NARROW = ("bfloat16", "float8", "error feedback", "comm hook")
WITHOUT_MASTERS = {"rtol": 0.02, "atol": 2e-3}  # the bare module has parameters of 16 bits alone


class Bare(nn.Module):
    """What a way of use calls besides the forward, without any wrapper."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

    def no_sync(self):
        return nullcontext()

    def set_gradient_weight(self, weight):
        pass

    def clip_grad_norm_(self, limit):
        return nn.utils.clip_grad_norm_(self.module.parameters(), limit)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("name", WAYS)
def test_a_way_of_use_trains_as_the_bare_module_does(nccl, name):
    way = WAYS[name]
    ours, theirs = way.run(), replace(way, wrap=Bare, make=None).run()
    first = [param.detach().clone() for param in theirs().parameters()]
    ours()
    for _ in range(STEPS):
        mine, others = ours(), theirs()
    narrow = any(word in name for word in NARROW)
    tolerance = WITHOUT_MASTERS if "masters" in name else ROUNDED if narrow else EXACT
    changed = []
    for param, other, before in zip(mine.parameters(), others.parameters(), first, strict=True):
        torch.testing.assert_close(param, other, **tolerance)
        changed.append(not torch.equal(param, before))
    assert sum(changed) >= len(changed) / 2  # it has trained; one layer of two may be unused
