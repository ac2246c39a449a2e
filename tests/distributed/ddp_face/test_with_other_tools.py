"""What users put around DistributedDataParallel: AMP, clipping, sharded optimizers, copies, compilers, checkpoints.

Each beside torch's class where that works, else against means that are computed here.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from dpfuse import DataParallel, DistributedDataParallel, DPFuseError
from tests.distributed.averaging.test_against_ddp import Mlp
from tests.distributed.ddp_face.test_training_steps import (
    CLASSES,
    Normed,
    assert_equal_models,
    batch,
    both,
    built,
    of_rank_0,
)
from tests.torch_ddp import TAKES

STEPS = 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_scaler_and_clipping_equal_torchs(rank, size, dtype):
    models = both(built(Mlp, rank))
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in models]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for step in range(STEPS):
        for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = model(batch(rank, step), step).float().square().mean()
            if step == 2 and rank == 1:
                loss = loss * float("inf")  # every rank must skip this step
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm.isfinite() == (step != 2)
            scaler.step(optimizer)
            scaler.update()
        if step != 2:
            assert_equal_models(*models, f"in step {step}")
    assert scalers[0].get_scale() == scalers[1].get_scale()


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.parametrize("views", [False, True], ids=["private", "views"])
def test_the_zero_redundancy_optimizer_equals_torchs(rank, size, views):
    models = both(built(Mlp, rank), gradient_as_bucket_view=views)
    optimizers = [ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=0.01) for m in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(rank, step), step).square().mean().backward()
            optimizer.step()
        assert_equal_models(*models, f"in step {step}")


def test_local_steps_with_an_averager_equal_torchs(rank, size):
    models = both(built(Mlp, rank))
    optimizers = [
        PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), PeriodicModelAverager(period=2, warmup_steps=2)
        )
        for model in models
    ]
    for step in range(STEPS + 1):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with model.no_sync():  # local gradients; the averager does the rest
                model(batch(rank, step), step).square().mean().backward()
            optimizer.step()
        assert_equal_models(*models, f"in step {step}")


class Twice(Mlp):
    """One checkpointed layer that runs twice; torch refuses the reentrant kind unless the graph is static."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=self.reentrant)
        return self.layers(x)


class Optional(Mlp):
    """A branch that only one rank uses, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.never = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        y = self.layers(x)
        return y + self.extra(x) if dist.get_rank() == 0 else y


def means(model: nn.Module, rank: int, size: int, losses: Any) -> list[Tensor | None]:
    twin = copy.deepcopy(model)
    twin.zero_grad()
    losses(twin).backward()
    found: list[Tensor | None] = []
    for param in twin.parameters():
        used = torch.tensor(float(param.grad is not None))
        value = (torch.zeros_like(param) if param.grad is None else param.grad) * (1 / size)
        dist.all_reduce(value)
        dist.all_reduce(used)
        found.append(value if used else None)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("net", [Twice, Optional])
@pytest.mark.filterwarnings("ignore:.*got no gradient in this backward:UserWarning")
def test_graphs_that_torch_refuses_or_must_be_told_of_get_the_mean(
    rank: int, size: int, net: type[nn.Module], options: dict[str, Any]
) -> None:
    model = DistributedDataParallel(built(net, rank), **options)
    for step in range(4):
        expected = means(model.module, rank, size, lambda module, step=step: module(batch(rank, step)).square().sum())
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        for (name, param), mean in zip(model.module.named_parameters(), expected, strict=True):
            assert (param.grad is None) == (mean is None), name
            assert mean is None or torch.equal(param.grad, mean), name


def copied(model: Any, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_train_on_as_torchs_do(rank, size, way):
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "forward_sync_buffers": False, "bucket_cap_mb": 2}
    models = [copied(model, way) for model in both(built(Normed, rank), **options)]
    for name in ("gradient_as_bucket_view", "forward_sync_buffers", "broadcast_buffers", "bucket_bytes_cap", "device"):
        known = name if name in (*TAKES, "bucket_bytes_cap", "device") else "broadcast_buffers"
        assert getattr(models[0], name) == getattr(models[1], known), name
    assert models[0].process_group is dist.group.WORLD
    for step in range(STEPS):
        for model in models:
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
        assert_equal_models(*models, f"in step {step}", sent=False)


def test_over_another_group_pickling_is_refused_as_in_torch(rank, size):
    for model in both(built(Mlp, rank), process_group=dist.new_group()):
        with pytest.raises(RuntimeError, match="default process group") as caught:
            pickle.dumps(model)
        assert type(model) is TorchDDP or isinstance(caught.value, DPFuseError)


def test_state_dicts_travel_between_the_wrappers_and_the_bare_module(rank, size):
    source = both(built(Normed, rank, differ=True))
    for model in source:
        model(batch(rank, 0)).sum().backward()
    states = [model.state_dict() for model in source] + [source[0].module.state_dict()]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, of_rank_0(b)) for a, b in zip(states[0].values(), states[1].values(), strict=True))
    states[1].update({name: value.clone() for name, value in states[0].items()})
    assert states[0]._metadata.keys() == states[1]._metadata.keys()
    for state in states:
        for target in (*both(built(Normed, 7)), built(Normed, 8)):
            prefixed = next(iter(state)).startswith("module.")
            if type(target) is DistributedDataParallel or prefixed == (type(target) is TorchDDP):
                assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
                own = target if type(target) is Normed else target.module
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(own.state_dict().values(), source[0].module.state_dict().values(), strict=True)
                )
    bare = built(Normed, 9)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(states[0], "module.")
    bare.load_state_dict(states[0])


def test_wrong_state_dicts_are_torchs_errors(rank, size):
    good = built(Mlp, rank).state_dict()
    wrong = [
        {key: value for key, value in good.items() if key != "layers.0.bias"},
        good | {"other": torch.zeros(1)},
        good | {"layers.0.bias": torch.zeros(5)},
    ]
    patterns = ["Missing key.*module.layers.0.bias", "Unexpected key.*module.other", "size mismatch for module.layers"]
    for state, pattern in zip(wrong, patterns, strict=True):
        for model in both(built(Mlp, rank)):
            with pytest.raises(RuntimeError, match=f"(?s)Error.* in loading state_dict.*{pattern}"):
                model.load_state_dict({f"module.{key}": value for key, value in state.items()})


def test_keys_of_distributed_checkpoints_are_those_of_torchs_wrapper(rank, size):
    """Torch takes the prefix off where the model is an instance of its class, so ours is registered as one."""
    ours, theirs = both(built(Normed, rank))
    assert isinstance(ours, TorchDDP)
    assert not isinstance(DataParallel(built(Normed, rank)), TorchDDP)
    state, expected = get_model_state_dict(ours), get_model_state_dict(theirs)
    assert list(state) == list(expected)
    for model in (DistributedDataParallel(built(Normed, 5)), TorchDDP(built(Normed, 5))):
        set_model_state_dict(model, dict(state))  # it puts the prefix into the keys it was given
        assert model.module.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.module.state_dict().items())


def graphs_of(model_class: Any, cap: float, order: str, fullgraph: bool) -> int:
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    module = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(12)])
    deep = Deep(module)
    if order == "outside":
        model = torch.compile(model_class(deep, bucket_cap_mb=cap), backend=backend, fullgraph=fullgraph)
    else:
        model = model_class(torch.compile(deep, backend=backend, fullgraph=fullgraph), bucket_cap_mb=cap)
    for _ in range(2):
        model(torch.ones(2, 512)).sum().backward()
    return len(graphs)


class Deep(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("cap", [2, 4])
@pytest.mark.filterwarnings("ignore::Warning:torch")
def test_the_compiler_splits_graphs_where_it_splits_torchs(rank, size, cap, order):
    """And fullgraph=True, which torch's class cannot take outside, changes nothing."""
    ours, theirs = (graphs_of(model_class, cap, order, False) for model_class in CLASSES)
    assert ours == theirs > 2
    assert graphs_of(DistributedDataParallel, cap, order, True) == ours


@pytest.mark.parametrize("order", [pytest.param("outside", marks=pytest.mark.slow), "inside"])
@pytest.mark.filterwarnings("ignore::Warning:torch")
def test_compiled_steps_equal_torchs_bitwise(rank, size, order):
    torch._dynamo.reset()
    models = []
    for model in both(built(Normed, rank), bucket_cap_mb=1):
        if order == "outside":
            models.append(model)
            continue
        models.append(type(model)(torch.compile(model.module, backend="aot_eager"), bucket_cap_mb=1))
    calls = [torch.compile(m, backend="aot_eager") if order == "outside" else m for m in models]
    for step in range(4):
        for model, call in zip(models, calls, strict=True):
            model.zero_grad()
            call(batch(rank, step)).square().sum().backward()
        assert_equal_models(*models, f"in step {step}")
