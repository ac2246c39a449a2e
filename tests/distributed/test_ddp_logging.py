"""`_get_ddp_logging_data()`: what torch's class says too means the same; what went wrong is in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dpfuse import DistributedDataParallel
from dpfuse.errors import DPFuseError

# Torch writes the first two later or never, rebuilds its buckets by other rules, and numbers sampled iterations only.
OWN = {
    "can_set_static_graph",
    "static_graph",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "iteration",
}
FACES = (DistributedDataParallel, TorchDDP)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(3, 4, bias=False)
        self.wide = nn.Linear(4, 2, bias=False).double()

    def forward(self, x):
        return self.wide(self.narrow(x).double())


def after_three_steps(rank, size):
    data = []
    for cls in FACES:
        model = cls(TwoDtypes())
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
        data.append(model._get_ddp_logging_data())
    ours, theirs = data
    assert ours["iteration"] == 3
    return {key: (value, theirs.get(key)) for key, value in ours.items() if key not in OWN}


def test_facts_after_training_are_those_of_torch(ranks):
    for facts in ranks(after_three_steps):
        for key, (ours, theirs) in facts.items():
            assert ours == theirs, key
        assert {"dtypes", "has_rebuilt_buckets", "gloo_socket_ifname"} <= facts.keys()
        assert "has_error" not in facts


def after_a_bad_hook(rank, size):
    logged = []
    for cls in FACES:
        model = cls(nn.Linear(2, 2))
        with pytest.raises(TypeError):
            model.register_comm_hook(None, 3)
        data = model._get_ddp_logging_data()
        logged.append((data["has_error"], data["error"]))
    return logged


def test_a_hook_that_was_refused_is_logged(ranks):
    for ours, theirs in ranks(after_a_bad_hook):
        assert ours[0] == theirs[0] == 1
        assert ours[1].startswith(theirs[1].removesuffix("."))


def raise_deliberately(grad):
    raise ValueError("deliberate")


def after_a_backward_that_failed_elsewhere(rank, size):
    model = DistributedDataParallel(nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    if rank == 0:
        model.module.weight.register_hook(raise_deliberately)
        with pytest.raises(ValueError, match="deliberate"):
            loss.backward()
        with pytest.raises(DPFuseError):
            model(torch.ones(1, 2))  # tells the other rank
        return
    with pytest.raises(DPFuseError) as raised:
        loss.backward()
    assert model._get_ddp_logging_data()["error"] == f"{DPFuseError}: {raised.value}"


def test_a_backward_that_failed_is_logged(ranks):
    ranks(after_a_backward_that_failed_elsewhere)


def after_a_join(rank, size):
    model = DistributedDataParallel(nn.Linear(2, 2))
    before = model._get_ddp_logging_data().get("join_uneven_inputs")
    with model.join():
        for _ in range(2 + rank):
            model(torch.ones(1, 2)).sum().backward()
    return before, model._get_ddp_logging_data()["join_uneven_inputs"], model._authoritative_rank


def test_a_join_is_logged(ranks):
    assert ranks(after_a_join) == 2 * [(None, True, 1)]
