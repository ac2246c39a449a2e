"""State dicts: interchangeable with the bare module's and with torch DDP's, tensors or numpy arrays."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpfuse import DataParallel
from dpfuse.model.state_dict import own_names, without_prefix

pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """A child, tensors of its own, persistent and other buffers, and a tied and a frozen parameter."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(3))
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("own_buffer", torch.randn(2))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        if fill is not None:
            with torch.no_grad():
                for tensor in [*self.parameters(), *self.buffers()]:
                    tensor.fill_(fill)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x * self.own))


class HasModule(nn.Module):
    """A module with a child of the name that wrappers use."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2) if depth == 1 else HasModule(depth - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Migrating(nn.Module):
    """Stores its weight transposed since version 2, and turns older state dicts round when it loads them."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class WithExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def assert_same(one: Any, other: Any) -> None:
    one, other = dict(one), dict(other)
    assert list(one) == list(other)
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def assert_loaded(result: Any) -> None:
    assert (list(result[0]), list(result[1])) == ([], [])


def test_keys_have_no_prefix_and_values_share_memory_with_the_module():
    model = DataParallel(Net())
    state = model.state_dict()
    assert list(state) == list(model.module.state_dict())
    assert "scratch" not in state
    assert all(tensor.data_ptr() == model.module.state_dict()[key].data_ptr() for key, tensor in state.items())
    assert not any(tensor.requires_grad for tensor in state.values())
    assert model.state_dict(keep_vars=True)["own"] is model.module.own
    assert next(iter(model.state_dict(prefix="net."))) == "net.own"


@pytest.mark.parametrize("method", ["load_state_dict", "set_state_dict"])
@pytest.mark.parametrize("source", ["bare", "wrapped", "ddp"])
def test_every_form_loads_into_the_wrapper(source, method):
    inner = Net()
    state = {
        "bare": lambda: inner,
        "wrapped": lambda: DataParallel(inner),
        "ddp": lambda: DistributedDataParallel(inner),
    }
    model = DataParallel(Net())
    assert_loaded(getattr(model, method)(state[source]().state_dict()))
    assert_same(model.state_dict(), inner.state_dict())


def test_the_wrappers_state_dict_loads_into_the_bare_module_and_prefixed_into_ddp():
    model = DataParallel(Net())
    bare, ddp = Net(), DistributedDataParallel(Net())
    assert_loaded(bare.load_state_dict(model.state_dict()))
    assert_loaded(ddp.load_state_dict(model.state_dict(prefix="module.")))
    assert_same(bare.state_dict(), model.state_dict())
    assert_same(ddp.module.state_dict(), model.state_dict())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["load_state_dict", "set_state_dict"])
def test_a_module_with_a_child_called_module_loads_every_form(method, depth):
    inner = HasModule(depth)
    for state in (inner.state_dict(), DataParallel(inner).state_dict(), DistributedDataParallel(inner).state_dict()):
        model = DataParallel(HasModule(depth))
        assert_loaded(getattr(model, method)(state))
        assert_same(model.state_dict(), inner.state_dict())
        parent = nn.ModuleDict({"child": DataParallel(HasModule(depth))})
        assert_loaded(parent.load_state_dict({f"child.{key}": value for key, value in state.items()}))
        assert_same(parent["child"].state_dict(), inner.state_dict())


@pytest.mark.parametrize("method", ["load_state_dict", "set_state_dict"])
def test_values_may_be_numpy_arrays(method):
    inner = Net()
    arrays = {key: value.numpy().copy() for key, value in inner.state_dict().items()}
    model = DataParallel(Net())
    assert_loaded(getattr(model, method)(arrays))
    assert_same(model.state_dict(), inner.state_dict())
    assert_loaded(getattr(model, method)({f"module.{key}": value.astype("f8") for key, value in arrays.items()}))
    assert_same(model.state_dict(), inner.state_dict())


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)  # as np.load(mmap_mode="r") gives them
    return array


def backwards(array: np.ndarray) -> np.ndarray:
    return array[::-1].copy()[::-1]


def other_byte_order(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder())


@pytest.mark.parametrize("method", ["load_state_dict", "set_state_dict"])
@pytest.mark.parametrize("kind", [read_only, backwards, other_byte_order])
def test_numpy_arrays_may_be_of_every_kind(method, kind):
    inner = nn.Linear(2, 2)
    model = DataParallel(nn.Linear(2, 2))
    getattr(model, method)({key: kind(value.numpy().copy()) for key, value in inner.state_dict().items()})
    assert_same(model.state_dict(), inner.state_dict())


def test_a_destination_is_filled_and_returned():
    model = DataParallel(nn.Linear(2, 2))
    destination: OrderedDict[str, Any] = OrderedDict(before=1)
    assert model.state_dict(destination) is destination
    assert list(destination) == ["before", "weight", "bias"]
    plain: dict[str, Any] = {}
    assert model.state_dict(destination=plain) is plain
    assert list(plain) == ["weight", "bias"]


def test_sublayers_can_be_left_out():
    model = DataParallel(Net())
    assert list(model.state_dict(include_sublayers=False)) == ["own", "frozen", "own_buffer"]
    assert list(DataParallel(nn.Sequential(nn.Linear(2, 2))).state_dict(include_sublayers=False)) == []


def test_own_names_are_param_and_buffer_with_the_registration_index():
    assert own_names(Net()) == {
        "param_0": "own",
        "param_1": "frozen",
        "param_2": "linear.weight",
        "param_3": "linear.bias",
        "param_4": "norm.weight",
        "param_5": "norm.bias",
        "buffer_0": "own_buffer",
        "buffer_1": "scratch",
        "buffer_2": "norm.running_mean",
        "buffer_3": "norm.running_var",
        "buffer_4": "norm.num_batches_tracked",
    }
    inner = Net()
    state = inner.state_dict()
    model = DataParallel(Net())
    own = {own: state[name] for own, name in own_names(inner).items() if name in state}
    assert_loaded(model.set_state_dict(own, use_structured_name=False))
    assert_same(model.state_dict(), state)
    with pytest.raises(ValueError, match="no key"):
        model.set_state_dict(own)


def test_own_names_of_a_tied_module_are_complete_with_one_name_per_parameter():
    def tied() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        module[1].weight = module[0].weight
        return module

    model = DataParallel(tied())
    assert_loaded(model.set_state_dict({"param_0": torch.ones(2, 2)}, use_structured_name=False))
    assert torch.equal(model.module[1].weight, torch.ones(2, 2))


def test_missing_and_unexpected_keys_are_returned_and_warned_of():
    model = DataParallel(nn.Linear(2, 2))
    bias = model.module.bias.detach().clone()
    with pytest.warns(UserWarning, match="set_state_dict") as caught:
        result = model.set_state_dict({"weight": torch.ones(2, 2), "more": torch.ones(1)})
    assert tuple(map(list, result)) == (["bias"], ["more"])
    assert ["missing keys: 'bias'" in str(w.message) for w in caught] == [True, False]
    assert ["unexpected keys: 'more'" in str(w.message) for w in caught] == [False, True]
    assert {w.filename for w in caught} == {__file__}
    assert torch.equal(model.module.weight, torch.ones(2, 2))
    assert torch.equal(model.module.bias, bias)


def test_strict_loading_raises_what_torch_raises():
    bare, model = nn.Linear(2, 2), DataParallel(nn.Linear(2, 2))
    for state in (
        {"weight": torch.ones(2, 2), "more": torch.ones(1)},
        {"weight": torch.ones(3, 2), "bias": torch.ones(2)},
        {},
    ):
        with pytest.raises(RuntimeError) as torchs:
            bare.load_state_dict(state)
        with pytest.raises(RuntimeError, match=re.escape(str(torchs.value))):
            model.load_state_dict(state)
    result = model.load_state_dict({"weight": torch.ones(2, 2), "more": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["more"])


@pytest.mark.parametrize("form", ["own", "bare", "ddp"])
def test_a_wrapper_inside_another_module_round_trips(form):
    def parent(child: nn.Module) -> nn.Module:
        return nn.ModuleDict({"child": child, "head": nn.Linear(2, 2)})

    bare = parent(Net())
    state = {"own": parent(DataParallel(Net())), "bare": bare, "ddp": parent(DistributedDataParallel(Net()))}[
        form
    ].state_dict()
    wrapped = parent(DataParallel(Net()))
    assert list(wrapped.state_dict()) == list(bare.state_dict())
    assert_loaded(wrapped.load_state_dict(state))
    assert_same(wrapped.state_dict(), without_prefixes(state))
    assert_loaded(bare.load_state_dict(wrapped.state_dict()))
    assert_same(bare.state_dict(), wrapped.state_dict())


def without_prefixes(state: Any) -> dict[str, Tensor]:
    return {key.replace("child.module.", "child."): value for key, value in state.items()}


def test_a_parent_names_what_is_missing_and_unexpected_in_the_wrapped_module():
    parent = nn.ModuleDict({"child": DataParallel(nn.Linear(2, 2))})
    result = parent.load_state_dict({"child.weight": torch.ones(2, 2), "child.more": torch.ones(1)}, strict=False)
    assert [key.replace("child.module.", "child.") for key in result.missing_keys] == ["child.bias"]
    assert [key.replace("child.module.", "child.") for key in result.unexpected_keys] == ["child.more"]
    assert torch.equal(parent["child"].weight, torch.ones(2, 2))


def test_a_wrapped_wrapper_has_no_prefix_either():
    inner = Net()
    with pytest.warns(UserWarning, match="wrapped twice"):
        model = DataParallel(DataParallel(Net()))
    assert_loaded(model.load_state_dict(inner.state_dict()))
    assert_same(model.state_dict(), inner.state_dict())


def load_through_wrapper(module: nn.Module, state: Any) -> None:
    DataParallel(module).load_state_dict(state)


def set_through_wrapper(module: nn.Module, state: Any) -> None:
    DataParallel(module).set_state_dict(state)


@pytest.mark.parametrize("load", [load_through_wrapper, set_through_wrapper])
@pytest.mark.parametrize("wrap", [nn.Sequential, DataParallel, DistributedDataParallel])
def test_the_versions_in_a_state_dict_reach_the_modules(load, wrap):
    source, target = nn.Sequential(Migrating()), nn.Sequential(Migrating())
    load(target, source.state_dict() if wrap is nn.Sequential else wrap(source).state_dict())
    assert_same(target.state_dict(), source.state_dict())


def test_the_versions_in_the_wrappers_state_dict_reach_a_bare_module():
    source, target = nn.Sequential(Migrating()), nn.Sequential(Migrating())
    target.load_state_dict(DataParallel(source).state_dict())
    assert_same(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("wrap", [DataParallel, DistributedDataParallel])
def test_the_versions_in_a_parents_state_dict_reach_the_modules(wrap):
    source, target = nn.Sequential(Migrating()), nn.Sequential(Migrating())
    parent = nn.ModuleDict({"child": DataParallel(target)})
    parent.load_state_dict(nn.ModuleDict({"child": wrap(source)}).state_dict())
    assert_same(target.state_dict(), source.state_dict())


def load_through_parent(module: nn.Module, state: Any) -> None:
    parent = nn.ModuleDict({"child": DataParallel(module)})
    parent.load_state_dict({f"child.{key}": value for key, value in state.items()})


@pytest.mark.parametrize("extra", [{"step": 3}, torch.ones(2)], ids=["dict", "tensor"])
@pytest.mark.parametrize("load", [load_through_wrapper, set_through_wrapper, load_through_parent])
def test_extra_state_of_a_module_is_loaded(load, extra):
    source, target = WithExtraState(extra), WithExtraState({} if isinstance(extra, dict) else torch.zeros(3))
    load(target, DataParallel(source).state_dict())
    assert str(target.extra) == str(extra)
    assert torch.equal(target.linear.weight, source.linear.weight)


def test_assign_replaces_the_parameters_as_torch_does():
    model = DataParallel(nn.Linear(2, 2))
    state = {"weight": nn.Parameter(torch.ones(2, 2)), "bias": nn.Parameter(torch.ones(2))}
    model.load_state_dict(state, assign=True)
    assert model.module.weight is state["weight"]


def test_loading_leaves_the_given_dict_alone():
    model = DataParallel(nn.Linear(2, 2))
    state = DistributedDataParallel(nn.Linear(2, 2)).state_dict()
    keys = list(state)
    model.load_state_dict(state)
    model.set_state_dict(state)
    assert list(state) == keys


def test_prefixes_are_told_apart_by_what_fits():
    one, other = nn.Linear(2, 2, bias=False), HasModule()
    prefixed = {"module.weight": 1}
    assert without_prefix(prefixed, one) == {"weight": 1}
    assert without_prefix(prefixed, other) == prefixed
    both = {"module.other": 1, "weight": 2}
    assert without_prefix(both, one) == both
    value = without_prefix({"weight": np.ones(2, dtype=np.float32)}, one)["weight"]
    assert torch.equal(value, torch.ones(2))
