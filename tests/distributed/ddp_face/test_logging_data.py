"""`_get_ddp_logging_data()`: what torch's class says too means the same; what went wrong is in it."""

from __future__ import annotations

from time import perf_counter_ns

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


def test_a_backward_that_failed_is_logged(rank, size):
    model = DistributedDataParallel(nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    if rank == 0:
        model.module.weight.register_hook(raise_deliberately)
        with pytest.raises(ValueError, match="deliberate"):
            loss.backward()
        model(torch.ones(1, 2))  # tells the other rank
        return
    with pytest.raises(DPFuseError) as raised:
        loss.backward()
    assert model._get_ddp_logging_data()["error"] == f"{DPFuseError}: {raised.value}"


def after_a_join(rank, size):
    model = DistributedDataParallel(nn.Linear(2, 2))
    before = model._get_ddp_logging_data().get("join_uneven_inputs")
    with model.join():
        for _ in range(2 + rank):
            model(torch.ones(1, 2)).sum().backward()
    return before, model._get_ddp_logging_data()["join_uneven_inputs"], model._authoritative_rank


def test_a_join_is_logged(ranks):
    assert ranks(after_a_join) == 2 * [(None, True, 1)]


TIMES = ("forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time")


def timed(rank, size):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), metrics=True)
    assert not {*TIMES} & model._get_ddp_logging_data().keys()
    seen = []
    for _ in range(3):
        begin = perf_counter_ns()
        model(torch.ones(200, 300)).sum().backward()
        seen.append((perf_counter_ns() - begin, model._get_ddp_logging_data()))
    theirs = TorchDDP(nn.Linear(2, 2))
    for _ in range(11):  # it samples the first ten, and then some
        theirs(torch.ones(2, 2)).sum().backward()
    return seen, theirs._get_ddp_logging_data()


def test_times_have_torchs_names_and_add_up(ranks):
    for seen, theirs in ranks(timed):
        for total, data in seen:
            forward, backward, comm, overlap = (data[name] for name in TIMES)
            assert 0 < forward + backward < total
            assert 0 <= overlap <= comm
            assert forward + backward + comm - overlap <= total
        for name in TIMES:
            values = [data[name] for _, data in seen]
            assert data[f"avg_{name}"] == sum(values) // 3
            assert type(theirs[name]) is type(theirs[f"avg_{name}"]) is type(data[f"avg_{name}"]) is int
