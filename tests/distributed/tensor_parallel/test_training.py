"""A model in a mesh of two dimensions trains as one process, and its parameters stay what and where they were."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.tensor_parallel.models import (
    FACES,
    Everything,
    Sequence,
    Tied,
    Transformer,
    loss_of,
    made,
    mesh_of_four,
    whole,
    words_of,
    wrapper_of,
)


def train_beside_one_process(rank, size, kind, face, windows=1, steps=5, foreach=False):
    mesh = mesh_of_four()
    net, alone = made(kind, mesh["tp"]), made(kind)
    params, keys = dict(net.named_parameters()), list(net.state_dict())
    model = FACES[face](net, mesh)
    assert all(param is params[name] for name, param in net.named_parameters())
    assert list(params) == [name for name, _ in alone.named_parameters()]
    assert list(net.state_dict()) == keys == list(alone.state_dict())
    options = {"lr": 1e-2, "foreach": foreach}
    plain = [param for param in net.parameters() if not isinstance(param, DTensor)]
    divided = [param for param in net.parameters() if isinstance(param, DTensor)]
    groups = [{"params": plain}, {"params": divided}] if foreach else list(net.parameters())
    optimizer = torch.optim.AdamW(groups, **options)
    reference = torch.optim.AdamW(alone.parameters(), **options)
    for step in range(steps):
        for micro in range(windows):
            batch = step * windows + micro
            with wrapper_of(model).no_sync(enabled=micro < windows - 1), wrapper_of(model).no_sync(enabled=False):
                (loss_of(model, words_of(mesh.get_local_rank("dp"), batch)) / windows).backward()
            for replica in range(2):
                (loss_of(alone, words_of(replica, batch)) / windows / 2).backward()
        for name, param in net.named_parameters():
            assert type(param.grad) is (DTensor if isinstance(param, DTensor) else torch.Tensor), name
            if isinstance(param, DTensor):
                assert param.grad.placements == param.placements
            expected = alone.get_parameter(name).grad
            # The sums over the parts of a product have another order.
            torch.testing.assert_close(whole(param.grad), expected, rtol=1e-4, atol=1e-6, msg=f"{step}: {name}")
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(whole(value), alone.state_dict()[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", ["DataParallel", "DistributedDataParallel", "replicate", "views"])
def test_a_divided_layer_trains_on_each_face(ranks, face):
    ranks(train_beside_one_process, Tied, face, size=4)


@pytest.mark.parametrize(
    "kind",
    [Sequence, pytest.param(Everything, marks=pytest.mark.slow), pytest.param(Transformer, marks=pytest.mark.slow)],
)
def test_each_kind_of_division_trains(ranks, kind):
    ranks(train_beside_one_process, kind, "DistributedDataParallel", size=4)


@pytest.mark.parametrize("kind", [Sequence, pytest.param(Everything, marks=pytest.mark.slow)])
def test_gradients_accumulate_in_windows(ranks, kind):
    ranks(train_beside_one_process, kind, "DataParallel", 3, size=4)


@pytest.mark.parametrize("face", ["DataParallel", pytest.param("views", marks=pytest.mark.slow)])
def test_an_optimizer_with_foreach_takes_each_kind_of_parameter(ranks, face):
    ranks(train_beside_one_process, Sequence, face, 1, 5, True, size=4)
