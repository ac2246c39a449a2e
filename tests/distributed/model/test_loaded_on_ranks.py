"""A training goes on from a state dict with old or prefixed names: the same gradients as torch's class gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel, "replicate": dpfuse.replicate}


class Net(nn.Module):
    """Has a child called module, and layers that had other names once."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.module, self.top = nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        for key in [key for key in state if key.startswith(f"{prefix}classifier.")]:
            state[f"{prefix}top.{key.removeprefix(f'{prefix}classifier.')}"] = state.pop(key)

    def forward(self, inputs):
        return self.top(self.module(inputs)) @ self.weight


def old_names(net):
    names = {"top.parametrizations.weight.original0": "classifier.weight_g"}
    names["top.parametrizations.weight.original1"] = "classifier.weight_v"
    return {names.get(key, key): value.clone() for key, value in net.state_dict().items()}


def gradients(model, rank):
    model(torch.full((3, 4), rank + 1.0)).square().sum().backward()
    return [param.grad for param in model.parameters()]


CASES = [(face, prefix) for face in ("dp", "ddp") for prefix in ("", "module.", "module._orig_mod.")]
CASES += [("replicate", "")]  # it is the module itself


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("face", "prefix"), CASES)
@pytest.mark.parametrize("old", [False, True], ids=["new names", "old names"])
def test_the_first_gradients_after_loading_are_those_of_torchs_class(rank, size, face, prefix, old):
    source = Net(1)
    state = old_names(source) if old else source.state_dict()
    theirs = TorchDDP(Net(2 + rank))
    theirs.load_state_dict({f"module.{key}": value for key, value in state.items()})
    model = FACES[face](Net(2 + rank))
    model.load_state_dict({prefix + key: value for key, value in state.items()})
    for ours, expected in zip(gradients(model, rank), gradients(theirs, rank), strict=True):
        assert torch.equal(ours, expected)
