"""Where torch's tests want its class to refuse a step, ours takes it, and the gradients are the mean.

The oracle in the same run is torch's class with `find_unused_parameters=True`. Each test replaces one in
`lists.REFUSED`.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse

Ranks = Callable[..., list[Any]]
STEPS = 6


class TwoLayers(nn.Module):
    """Two layers, the second of which is used where the call says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x).relu()
        return self.second(x) if both else x


class Nested(nn.Module):
    """Modules in modules; the whole embedding and one of two layers are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {
                "embedding": nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 1)),
                "layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
                "norm": nn.BatchNorm1d(4),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["layers"][0](self.inner["norm"](x))


def train(
    rank: int, module: nn.Module, calls: Sequence[tuple[Any, ...]], *, declare: bool = False, **options: Any
) -> list[list[Tensor | None]]:
    """Take a step for each call, with our class and with torch's; our gradients of all steps.

    With `declare`, our class is told after the first that the graph is static.
    """
    torch.manual_seed(rank)
    ours = dpfuse.DistributedDataParallel(copy.deepcopy(module), **options)
    theirs = TorchDDP(module, find_unused_parameters=True)
    steps = []
    for step, call in enumerate(calls):
        x = torch.randn(8, 4)
        for model in (ours, theirs):
            model.zero_grad()
            model(x, *call).square().sum().backward()
        for (name, param), oracle in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if oracle.grad is None:
                assert param.grad is None, f"{name} in step {step}"
            else:
                assert torch.equal(param.grad, oracle.grad), f"{name} in step {step}"
        if step == 0 and declare:
            ours._set_static_graph()
        steps.append([param.grad for param in ours.parameters()])
    return steps


def usage(steps: list[list[Tensor | None]]) -> list[list[bool]]:
    """Which parameters had a gradient, by step."""
    return [[grad is not None for grad in grads] for grads in steps]


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are unused parameters
        return function(*args, **kwargs)


def all_alike(rank: int, size: int) -> list[list[bool]]:
    return usage(quietly(train, rank, TwoLayers(), [(step % 2 == 1,) for step in range(STEPS)]))


def test_layers_that_all_ranks_leave_unused_in_some_steps_get_the_mean(ranks: Ranks) -> None:
    assert ranks(all_alike) == 2 * [[[True, step % 2 == 1] for step in range(STEPS)]]


def one_differs(rank: int, size: int) -> list[list[bool]]:
    return usage(quietly(train, rank, TwoLayers(), [(step % 2 == 1 and rank == 1,) for step in range(STEPS)]))


def test_layers_that_one_rank_leaves_unused_get_the_mean(ranks: Ranks) -> None:
    # Rank 0 never uses the second layer; where rank 1 does, both get half of its gradient.
    assert ranks(one_differs) == 2 * [[[True, step % 2 == 1] for step in range(STEPS)]]


def never(rank: int, size: int) -> list[list[bool]]:
    return usage(quietly(train, rank, TwoLayers(), STEPS * [(False,)]))


def test_a_layer_that_is_never_used_does_not_end_training(ranks: Ranks) -> None:
    assert ranks(never) == 2 * [STEPS * [[True, False]]]


def nested(rank: int, size: int, ignored: list[str]) -> list[str]:
    module = Nested()
    if ignored:
        dpfuse.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    (*_, last) = usage(quietly(train, rank, module, STEPS * [()]))
    return [name for (name, _), used in zip(module.named_parameters(), last, strict=True) if used]


USED = ["inner.layers.0.weight", "inner.layers.0.bias", "inner.norm.weight", "inner.norm.bias"]


def test_unused_nested_modules_keep_no_gradient(ranks: Ranks) -> None:
    assert ranks(nested, []) == 2 * [USED]


def test_unused_nested_modules_beside_ignored_parameters_keep_no_gradient(ranks: Ranks) -> None:
    assert ranks(nested, ["inner.embedding.0.weight"]) == 2 * [USED]


def changes(rank: int, size: int, first: bool) -> list[list[bool]]:
    calls = [(first if step % 2 == 0 else not first,) for step in range(STEPS)]
    return usage(quietly(train, rank, TwoLayers(), calls, static_graph=True))


def test_a_graph_may_change_although_it_was_declared_static(ranks: Ranks) -> None:
    for first in (False, True):
        expected = [[True, first if step % 2 == 0 else not first] for step in range(STEPS)]
        assert ranks(changes, first) == 2 * [expected]


def declares(rank: int, size: int) -> list[list[bool]]:
    return usage(quietly(train, rank, TwoLayers(), STEPS * [(True,)], declare=True))


def test_static_graph_may_be_declared_after_the_first_step(ranks: Ranks) -> None:
    assert ranks(declares) == 2 * [STEPS * [[True, True]]]


def reloaded(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(nn.Linear(2, 1, bias=False), static_graph=True)
    for step in range(4):
        model.zero_grad()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5, 1.5]], step
        if step == 1:
            saved = io.BytesIO()
            torch.save(model, saved)
            saved.seek(0)
            model = torch.load(saved, weights_only=False)


def test_a_wrapper_declared_static_averages_after_it_was_saved_and_loaded(ranks: Ranks) -> None:
    # Torch's class does not: its ranks go on with gradients of their own, without a word (`lists.NOT_COUNTED`).
    ranks(reloaded)
