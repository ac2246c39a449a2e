"""fleet on one process and on two: init, workers, the model's options."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dpfuse
import dpfuse.paddle as paddle
from dpfuse.paddle.distributed import fleet
from dpfuse.paddle.distributed.fleet import session


@pytest.fixture
def alone(monkeypatch):
    """A process in which fleet has not been initialised; at the end it is so again."""
    monkeypatch.setattr(session, "_session", None)


def init_alone(**options):
    with pytest.warns(UserWarning, match="one process"):
        fleet.init(is_collective=True, **options)


def strategy(**fields):
    result = fleet.DistributedStrategy()
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def batch(rank, step=0):
    torch.manual_seed(100 * step + rank)
    return torch.randn(5, 4)


def sgd(params, lr=0.5, **options):
    return torch.optim.SGD(params, lr=lr, **options)


# --- one process


@pytest.mark.usefixtures("alone")
def test_one_process_trains_like_plain_torch_with_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fleet.init(is_collective=True)
        layers = net()
        model = fleet.distributed_model(layers)
        optimizer = fleet.distributed_optimizer(sgd(layers.parameters()))
        model(batch(0)).square().sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    assert [warning.category for warning in caught] == [UserWarning]
    reference = net()
    reference(batch(0)).square().sum().backward()
    sgd(reference.parameters()).step()
    assert all(torch.equal(a, b) for a, b in zip(layers.parameters(), reference.parameters(), strict=True))
    assert all(param.grad is None for param in layers.parameters())
    assert isinstance(model, paddle.DataParallel)


@pytest.mark.usefixtures("alone")
def test_one_process_is_worker_0_of_1(monkeypatch):
    monkeypatch.delenv("PADDLE_TRAINER_ENDPOINTS", raising=False)
    init_alone()
    assert (fleet.worker_index(), fleet.worker_num(), fleet.is_first_worker()) == (0, 1, True)
    assert (fleet.is_worker(), fleet.is_server(), fleet.server_num()) == (True, False, 0)
    assert fleet.worker_endpoints() == paddle.distributed.ParallelEnv().trainer_endpoints
    assert fleet.worker_endpoints(to_string=True) == ",".join(fleet.worker_endpoints())
    fleet.barrier_worker()


def test_a_barrier_before_init_is_refused_where_there_are_several_ranks(monkeypatch):
    job = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in job.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(dpfuse.DPFuseError, match=r"announces 2 ranks; call fleet.init\(is_collective=True\) first"):
        fleet.barrier_worker()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, r"write fleet.init\(is_collective=True\)"),
        ({"is_collective": 1}, TypeError, "is_collective must be True or False, got 1"),
        ({"role_maker": fleet.PaddleCloudRoleMaker()}, ValueError, "parameter-server"),
        ({"role_maker": 3}, TypeError, "role_maker must be a PaddleCloudRoleMaker or None, got int"),
        (
            {"is_collective": True, "strategy": {}},
            TypeError,
            "strategy must be an instance of DistributedStrategy, got dict",
        ),
        ({"is_collective": True, "log_level": "LOUD"}, ValueError, "LOUD"),
    ],
)
def test_init_refuses_what_it_cannot_do(arguments, error, text):
    with pytest.raises(error, match=text):
        fleet.init(**arguments)
    with pytest.raises(dpfuse.DPFuseError, match=r"call fleet.init\(is_collective=True\) first"):
        fleet.distributed_model(net())


@pytest.mark.usefixtures("alone")
def test_a_degree_that_is_not_the_number_of_ranks_is_refused():
    with (
        pytest.warns(UserWarning, match="one process"),
        pytest.raises(ValueError, match=r"dp_degree.*is 2.*has 1 ranks"),
    ):
        fleet.init(is_collective=True, strategy=strategy(hybrid_configs={"dp_degree": 2}))
    init_alone(strategy=strategy(hybrid_configs={"dp_degree": 1}))


@pytest.mark.usefixtures("alone")
def test_a_collective_role_maker_is_enough():
    with pytest.warns(UserWarning, match="one process"):
        fleet.init(fleet.PaddleCloudRoleMaker(is_collective=True))
    assert fleet.distributed_model(net()).bucket_plan.comm_buffer_size == 32 * 2**20


@pytest.mark.usefixtures("alone")
def test_optimizers_are_refused_before_init_and_where_they_are_none():
    with pytest.raises(dpfuse.DPFuseError, match=r"fleet\.init"):
        fleet.distributed_optimizer(sgd(net().parameters()))
    init_alone()
    with pytest.raises(TypeError, match=r"torch.optim.Optimizer .* got list"):
        fleet.distributed_optimizer([])
    with pytest.raises(TypeError, match="not distributed yet, got DistributedOptimizer"):
        fleet.distributed_optimizer(fleet.distributed_optimizer(sgd(net().parameters())))
    with pytest.raises(TypeError, match=r"DistributedStrategy, got int"):
        fleet.distributed_optimizer(sgd(net().parameters()), 3)
    with pytest.raises(TypeError, match="layers must be"):
        fleet.distributed_model(3)


@pytest.mark.usefixtures("alone")
def test_the_optimizers_strategy_holds_for_models_made_after_it():
    init_alone(strategy=strategy(fuse_grad_size_in_MB=8))
    layers = net()
    fleet.distributed_optimizer(sgd(layers.parameters()), strategy(fuse_grad_size_in_MB=4))
    model = fleet.distributed_model(layers)
    assert model.bucket_plan.comm_buffer_size == 4 * 2**20
    fleet.distributed_optimizer(sgd(layers.parameters()), strategy(fuse_grad_size_in_MB=4))
    with pytest.raises(dpfuse.DPFuseError, match=r"fuse_grad_size_in_MB=8(?s:.*)Pass the strategy to fleet.init"):
        fleet.distributed_optimizer(sgd(layers.parameters()), strategy(fuse_grad_size_in_MB=8))


@pytest.mark.usefixtures("alone")
def test_a_strategy_changed_after_init_changes_nothing():
    given = strategy(fuse_grad_size_in_MB=8)
    init_alone(strategy=given)
    given.fuse_grad_size_in_MB = 2
    assert fleet.distributed_model(net()).bucket_plan.comm_buffer_size == 8 * 2**20


# --- two ranks


def train(model, optimizer, rank, steps=2):
    """Two steps; the gradients of each."""
    gradients = []
    for step in range(steps):
        model(batch(rank, step)).square().mean().backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return gradients, [param.detach().clone() for param in model.parameters()]


def by_fleet(rank, size, fields, optimizer_first):
    fleet.init(is_collective=True, strategy=strategy(**fields))
    layers = net()
    if optimizer_first:
        optimizer = fleet.distributed_optimizer(sgd(layers.parameters(), momentum=0.5))
        model = fleet.distributed_model(layers)
    else:
        model = fleet.distributed_model(layers)
        optimizer = fleet.distributed_optimizer(sgd(model.parameters(), momentum=0.5))
    return [bucket.params for bucket in model.bucket_plan.buckets], train(model, optimizer, rank)


def by_hand(rank, size, options):
    layers = net()
    model = dpfuse.DataParallel(layers, **options)
    return train(model, sgd(layers.parameters(), momentum=0.5), rank)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize(
    ("fields", "options", "buckets"),
    [
        ({}, {}, [(0, 1, 2, 3)]),
        ({"fuse_all_reduce_ops": False}, {}, [(3,), (2,), (1,), (0,)]),
        ({"fuse_grad_size_in_MB": 36 / 2**20, "last_comm_group_size_MB": 48 / 2**20}, {}, [(3,), (1, 2), (0,)]),
        ({"gradient_scale_configs": {"scale_strategy": "sum"}}, {"gradient_scale": 1.0}, [(0, 1, 2, 3)]),
        ({"gradient_scale_configs": {"scale_strategy": "customized"}}, {"gradient_scale": 1.0}, [(0, 1, 2, 3)]),
        ({"gradient_scale_configs": {"scale_gradient": True}}, {}, [(0, 1, 2, 3)]),
        ({"fp16_allreduce": True}, {"wire_dtype": torch.float16}, [(0, 1, 2, 3)]),
        ({"find_unused_parameters": True, "hybrid_configs": {"dp_degree": 2}}, {}, [(0, 1, 2, 3)]),
    ],
    ids=str,
)
def test_a_strategys_fields_become_the_wrappers_options(ranks, fields, options, buckets, optimizer_first):
    results = ranks(by_fleet, fields, optimizer_first)
    expected = ranks(by_hand, options)
    for (plan, (gradients, weights)), (hand_gradients, hand_weights) in zip(results, expected, strict=True):
        assert plan == buckets
        # With two ranks there is one order to sum in, whatever the buckets.
        assert all(
            torch.equal(a, b) for x, y in zip(gradients, hand_gradients, strict=True) for a, b in zip(x, y, strict=True)
        )
        assert all(torch.equal(a, b) for a, b in zip(weights, hand_weights, strict=True))


def sent_as_float16(rank, size, dtype):
    fleet.init(is_collective=True, strategy=strategy(fp16_allreduce=True))
    model = fleet.distributed_model(nn.Linear(1, 1, bias=False, dtype=dtype))
    (model(torch.ones(1, 1, dtype=dtype)) * 1e6).sum().backward()
    return model.module.weight.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_every_dtype_but_float64_travel_as_float16(ranks, dtype):
    assert all(gradient.dtype == dtype and gradient.isinf() for gradient in ranks(sent_as_float16, dtype))
    assert [gradient.item() for gradient in ranks(sent_as_float16, torch.float64)] == [1e6, 1e6]


def unused(rank, size, expected):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.left = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.used(x)

    fleet.init(is_collective=True, strategy=strategy(find_unused_parameters=expected))
    model = fleet.distributed_model(Half())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(rank)).sum().backward()
    return [str(warning.message) for warning in caught]


def test_unused_parameters_are_named_unless_they_are_expected(ranks):
    assert ranks(unused, True) == [[], []]
    assert all(len(texts) == 1 and "left.weight" in texts[0] for texts in ranks(unused, False))


def workers(rank, size):
    fleet.init(is_collective=True)
    fleet.barrier_worker()
    return fleet.worker_index(), fleet.worker_num(), fleet.is_first_worker()


def test_workers_are_the_ranks(ranks):
    assert ranks(workers) == [(0, 2, True), (1, 2, False)]


def different_strategies(rank, size):
    fleet.init(is_collective=True, strategy=strategy(sync_batch_norm=rank == 0))
    try:
        fleet.distributed_model(net())
    except dpfuse.DPFuseError as error:
        return str(error)
    return ""


def test_strategies_that_differ_between_ranks_are_an_error_on_every_rank(ranks):
    for text in ranks(different_strategies):
        assert "the strategy of fleet differs" in text
        assert "rank 1 has '    sync_batch_norm=False,', rank 0 has '    sync_batch_norm=True,'" in text
