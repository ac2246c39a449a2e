"""Keys of state dicts with and without the prefixes of wrappers and of torch.compile, for modules with load hooks.

torch's class is the oracle for its own form, and the values of the module that was saved for every other.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parametrizations

import dpfuse
from dpfuse.model.trial_load import misfits

pytestmark = pytest.mark.usefixtures("group")

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}
compiled = partial(torch.compile, backend="eager")  # nothing is compiled before the first call


class Renamed(nn.Module):
    """Its layers once had other names."""

    old = (("backbone.", "encoder."), ("classifier.", "top."))

    def __init__(self):
        super().__init__()
        self.encoder, self.top = nn.Linear(3, 3), nn.Linear(3, 3)
        self._register_load_state_dict_pre_hook(self.rename)
        self.calls = 0

    def rename(self, state, prefix, *_):
        self.calls += 1
        for old, new in self.old:
            for key in [key for key in state if key.startswith(prefix + old)]:
                state[f"{prefix}{new}{key.removeprefix(prefix + old)}"] = state.pop(key)


class RenamedModule(Renamed):
    """Its children are called as the wrapper's, and were so before: under one another's names."""

    old = (("module.", "encoder."), ("body.", "top."))


class RenamedByOverride(nn.Module):
    """Renames in its own way of loading, and reads the number in its file while it does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("format", torch.tensor(2))

    def _load_from_state_dict(self, state, prefix, *rest):
        if f"{prefix}format" in state and state[f"{prefix}format"].item() < 2:
            state[f"{prefix}format"] = torch.tensor(2)
            for name in ("weight", "bias"):
                state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}old_{name}")
        super()._load_from_state_dict(state, prefix, *rest)


class Nested(nn.Module):
    """Has a child with the name of the wrapper's, and one more inside."""

    def __init__(self):
        super().__init__()
        self.module = nn.Module()
        self.module.module = nn.Linear(3, 3)
        self.module.weight = nn.Parameter(torch.randn(3, 3))
        self.weight = nn.Parameter(torch.randn(3, 3))


class NestedRenamed(Nested):
    """Of its names, those in the child called module were others once."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[f"{prefix}module.{key.removeprefix(f'{prefix}old.')}"] = state.pop(key)


class NamedAsCompiled(nn.Module):
    """Has a child with the name that torch.compile gives."""

    def __init__(self):
        super().__init__()
        self._orig_mod = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3, 3))


def normed():
    layers = (nn.Linear(3, 3, bias=False) for _ in range(2))
    return nn.Sequential(*map(parametrizations.weight_norm, layers))


def replaced(state, *pairs):
    for old, new in pairs:
        state = {key.replace(old, new): value for key, value in state.items()}
    return state


def of_format_1(state):
    state = {"old_weight": state["layer.weight"], "old_bias": state["layer.bias"]}
    return {**state, "format": torch.tensor(1)}


# How each is made, and what its old state dict is, from a new one.
MODULES = {
    "a plain module": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), dict),
    "all renamed": (Renamed, lambda state: replaced(state, ("encoder", "backbone"), ("top", "classifier"))),
    "renamed from module": (RenamedModule, lambda state: replaced(state, ("encoder", "module"), ("top", "body"))),
    "renamed by an override": (RenamedByOverride, of_format_1),
    "an older weight norm": (
        normed,
        lambda state: replaced(
            state, ("parametrizations.weight.original0", "weight_g"), ("parametrizations.weight.original1", "weight_v")
        ),
    ),
    "children called module": (Nested, dict),
    "children called module, renamed": (
        NestedRenamed,
        lambda state: {f"old.{key.removeprefix('module.')}" if "." in key else key: state[key] for key in state},
    ),
    "a child called _orig_mod": (NamedAsCompiled, dict),
}
PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]


def values(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(one, other):
    one, other = one.state_dict().values(), other.state_dict().values()
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def as_it_is(module):
    return module


CASES = [
    (name, prefix, around)
    for name in MODULES
    for prefix in PREFIXES
    for around in (as_it_is, compiled)
    if name != "a child called _orig_mod" or ("_orig_mod" not in prefix and around is as_it_is)
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "prefix", "around"), CASES)
@pytest.mark.parametrize("face", FACES)
def test_old_and_new_names_are_loaded_with_and_without_prefixes(face, name, prefix, around):
    make, old = MODULES[name]
    source = make()
    for state in (values(source), old(values(source))):
        for method in ("load_state_dict", "set_state_dict")[: 1 + (face == "dp")]:
            target = make()
            model = FACES[face](around(target))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                missing, unexpected = getattr(model, method)({prefix + key: value for key, value in state.items()})
            assert (list(missing), list(unexpected)) == ([], [])
            assert same(target, source)
        if prefix == "module." and around is as_it_is:
            torchs = make()
            TorchDDP(torchs).load_state_dict({prefix + key: value for key, value in state.items()})
            assert same(torchs, source)


def loaded(model, inner, state, **how):
    """Return which of the module's tensors a load has changed, and what it has told."""
    before = values(inner)
    told = model.load_state_dict(state, strict=False, **how)
    changed = {key for key, value in inner.state_dict().items() if not torch.equal(value, before[key])}
    return changed, [*told.unexpected_keys]


@pytest.mark.parametrize("make", [Nested, NestedRenamed, RenamedModule, NamedAsCompiled])
def test_each_part_of_a_wrappers_own_state_dict_goes_to_its_own_parameter(make):
    """On the drop-in face as torch's class has it, with the same tensors changed, and the same keys unexpected."""
    names = [*make().state_dict()]
    parts = [[name] for name in names] + [names[:2], names[1:]]
    for part in parts:
        state = {name: torch.full_like(make().state_dict()[name], 7) for name in part}
        own = make()
        assert loaded(dpfuse.DataParallel(own), own, state) == (set(part), [])
        state = {f"module.{name}": value for name, value in state.items()}
        state["module.module.stranger"] = torch.ones(1)
        ours, torchs = make(), make()
        expected = loaded(TorchDDP(torchs), torchs, state)
        assert loaded(dpfuse.DistributedDataParallel(ours), ours, state) == expected
        assert expected[0] == set(part)


@pytest.mark.parametrize(
    "keys",
    [
        ["weight", "module.weight"],
        ["module.weight", "epoch"],
        ["module.old.weight"],
        ["module.", "module.weight"],
        ["module"],
        [],
        ["module.module.module.module.weight"],
        ["_fsdp_wrapped_module.weight", "module._fsdp_wrapped_module.bias"],
    ],
    ids=str,
)
def test_what_fits_in_no_reading_is_told_of_as_torchs_class_does(keys):
    for make in (lambda: nn.Linear(3, 3), Renamed, Nested):
        state = {key: torch.full((3, 3), 7.0) for key in keys}
        ours, torchs = make(), make()
        expected = loaded(TorchDDP(torchs), torchs, state)
        found = loaded(dpfuse.DistributedDataParallel(ours), ours, state)
        # What the wrapper adds: all are names of the bare module.
        assert found == expected or (found[1] == [] and all(key in ours.state_dict() for key in keys))


def test_an_error_has_the_names_of_the_program():
    bare = {"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3), "1.other": torch.ones(3)}
    state = {f"module.{key}": value for key, value in bare.items()}
    with pytest.raises(
        RuntimeError, match=r'"module.1.other"(.|\n)*\'0.weight\', where this state dict has \'module.0.weight\''
    ):
        dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 3))).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"'module.0.weight', where this state dict has '0.weight'"):
        dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3))).load_state_dict(bare)
    with pytest.raises(RuntimeError) as ours:
        dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3))).load_state_dict(state)
    with pytest.raises(RuntimeError) as torchs:
        TorchDDP(nn.Sequential(nn.Linear(3, 3))).load_state_dict(state)
    assert str(ours.value) == str(torchs.value)


def test_hooks_that_the_names_do_not_need_run_once():
    for face, prefix in (("dp", ""), ("ddp", "module."), ("dp", "module."), ("ddp", "")):
        target = Renamed()
        FACES[face](target).load_state_dict({prefix + key: value for key, value in values(Renamed()).items()})
        assert target.calls == 1


@pytest.mark.parametrize("face", FACES)
def test_hooks_run_once_where_no_key_has_a_prefix_that_could_be_a_wrappers(face):
    target = Renamed()
    own = "module." if face == "ddp" else ""
    state = {own + key: value for key, value in values(Renamed()).items()}
    FACES[face](target).load_state_dict({**state, f"{own}strange": torch.ones(1)}, strict=False)
    assert target.calls == 1


def test_a_hook_of_a_part_around_acts_on_its_stand_in():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = nn.Linear(3, 3), 0
            self.net._register_load_state_dict_pre_hook(self.rename)

        def rename(self, state, prefix, *_):
            self.calls += 1
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")

    target = Holder()
    state = {"module.net.old": torch.ones(3, 3), "module.net.bias": torch.ones(3)}
    dpfuse.DataParallel(target).load_state_dict(state)
    assert target.calls == 1
    assert torch.equal(target.net.weight, torch.ones(3, 3))


def test_a_trial_changes_nothing_of_the_module():
    """What its hooks write to the module, to its tensors, and to those of the state dict, is gone afterwards."""

    class Writing(Renamed):
        def rename(self, state, prefix, *rest):
            super().rename(state, prefix, *rest)
            self.encoder.weight.data.zero_()
            self.extra = nn.Parameter(torch.ones(1))
            for value in state.values():
                value.zero_()

    module = Writing()
    before, attributes, parameters = values(module), dict(vars(module)), list(module.parameters())
    state = MODULES["all renamed"][1](values(Renamed()))
    saved = {key: value.clone() for key, value in state.items()}
    found = misfits(module, state, None)
    assert (found.unexpected, found.errors) == ([], [])
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(torch.equal(value, saved[key]) for key, value in state.items())
    assert {key: id(value) for key, value in vars(module).items()} == {key: id(attributes[key]) for key in attributes}
    assert all(map(lambda a, b: a is b, module.parameters(), parameters))


def reads_values(module, state, prefix, *_):
    if f"{prefix}backbone.weight" in state and state[f"{prefix}backbone.weight"].sum() != 0:
        return
    raise KeyError("a hook that finds nothing to rename")


def loads_by_itself(module, state, prefix, *_):
    for key in [key for key in state if key.startswith(f"{prefix}own.")]:
        module.encoder.weight.data.copy_(state.pop(key))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_hook_that_cannot_be_tried_leaves_the_prefix_to_decide(face, prefix):
    """A trial has no values, so this hook fails in it."""
    source, target = Renamed(), Renamed()
    target.register_load_state_dict_pre_hook(reads_values)
    state = {prefix + key: value for key, value in MODULES["all renamed"][1](values(source)).items()}
    target._load_state_dict_pre_hooks = OrderedDict(reversed(target._load_state_dict_pre_hooks.items()))
    FACES[face](target).load_state_dict(state)
    assert same(target, source)


def test_a_hook_with_the_module_in_its_closure_loads_nothing_in_a_trial():
    target = Renamed()
    target._register_load_state_dict_pre_hook(partial(loads_by_itself, target))
    before = target.encoder.weight.detach().clone()
    with pytest.raises(NotImplementedError, match="no data"):
        misfits(target, {"own.weight": torch.full((3, 3), 7.0)}, None)
    assert torch.equal(target.encoder.weight, before)
    state = {f"module.{key}": value for key, value in values(Renamed()).items() if key != "encoder.weight"}
    dpfuse.DistributedDataParallel(target).load_state_dict({**state, "module.own.w": torch.ones(3, 3)}, strict=False)
    assert torch.equal(target.encoder.weight, torch.ones(3, 3))


def test_an_override_of_one_instance_is_honoured_and_one_that_is_no_method_is_not_tried():
    def override(module, state, prefix, *rest):
        state[f"{prefix}weight"] = state.pop(f"{prefix}old")
        nn.Linear._load_from_state_dict(module, state, prefix, *rest)

    for how in (MethodType, partial):
        target = nn.Linear(3, 3, bias=False)
        target._load_from_state_dict = how(override, target)
        dpfuse.DataParallel(target).load_state_dict({"module.old": torch.ones(3, 3)})
        assert torch.equal(target.weight, torch.ones(3, 3))


class Migrating(nn.Module):
    """Turns the state dicts of its first version round when it loads them."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("there", [lambda module: module, compiled, TorchDDP, lambda m: compiled(TorchDDP(m))])
@pytest.mark.parametrize("here", [lambda module: module, compiled])
def test_versions_reach_the_modules_whatever_was_around_them(face, there, here):
    source, target = nn.Sequential(Migrating()), nn.Sequential(Migrating())
    FACES[face](here(target)).load_state_dict(there(source).state_dict())
    assert same(target, source)


@pytest.mark.parametrize("face", FACES)
def test_compiled_parts_are_loaded_into_plain_ones_and_back(face):
    def make(around):
        return nn.ModuleDict({"first": around(nn.Linear(3, 3)), "last": nn.Linear(3, 3)})

    for there in (compiled, nn.Sequential, lambda module: module):
        for here in (compiled, lambda module: module):
            source, target = make(there), make(here)
            state = source.state_dict()
            if there is nn.Sequential:  # a name that torch.compile does not give
                with pytest.raises(RuntimeError, match=r"first\.0\.weight"):
                    FACES[face](target).load_state_dict(state)
                continue
            FACES[face](target).load_state_dict(state)
            assert same(target, source)


class Scaled(dpfuse.DistributedDataParallel):
    def __init__(self, module):
        super().__init__(module)
        self.scale = nn.Parameter(torch.ones(1))


class TorchScaled(TorchDDP):
    def __init__(self, module):
        super().__init__(module)
        self.scale = nn.Parameter(torch.ones(1))


def test_what_a_class_adds_to_the_wrapper_is_loaded_as_by_torchs_class():
    for kind in (TorchScaled, Scaled):
        model = kind(nn.Linear(3, 3))
        state = {key: torch.full_like(value, 7) for key, value in model.state_dict().items()}
        assert list(state) == ["scale", "module.weight", "module.bias"]
        model.load_state_dict(state)
        assert all(bool((value == 7).all()) for value in model.state_dict().values())


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_wrapper_inside_another_module_reads_old_names(face, prefix):
    for name in ("all renamed", "an older weight norm", "children called module", "children called module, renamed"):
        make, old = MODULES[name]
        source, target = make(), make()
        parent = nn.ModuleDict({"net": FACES[face](target), "head": nn.Linear(3, 3)})
        state = {f"net.{prefix}{key}": value for key, value in old(values(source)).items()}
        parent.load_state_dict(state | {f"head.{key}": value for key, value in parent["head"].state_dict().items()})
        assert same(target, source)


class Table(nn.Module):
    """Keeps whatever its file has."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination.update({prefix + key: value for key, value in self.rows.items()})

    def _load_from_state_dict(self, state, prefix, *_):
        self.rows = {key.removeprefix(prefix): state.pop(key) for key in [*state] if key.startswith(prefix)}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_module_that_takes_any_name_gets_its_own_names(face, prefix):
    target = Table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no parameters
        model = FACES[face](nn.ModuleDict({"layer": nn.Linear(1, 1), "table": target}))
    own = {f"layer.{key}": value for key, value in values(nn.Linear(1, 1)).items()}
    model.load_state_dict({prefix + key: value for key, value in (own | {"table.a": torch.ones(1)}).items()})
    assert target.rows == {"a": torch.ones(1)}


def test_set_state_dict_tells_what_is_missing_after_the_hooks():
    old = MODULES["all renamed"][1](values(Renamed()))
    target = Renamed()
    model = dpfuse.DataParallel(target)
    del old["backbone.bias"]
    with pytest.warns(UserWarning, match="set_state_dict"):
        told = model.set_state_dict(
            {f"module.{key}": value.numpy() for key, value in {**old, "more": old["classifier.bias"]}.items()}
        )
    assert told == (["encoder.bias"], ["more"])
    assert torch.equal(target.encoder.weight, old["backbone.weight"])
    before = values(target)
    old["backbone.weight"] = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"size mismatch for encoder.weight(.|\n)*nothing was loaded"):
        model.set_state_dict(old)
    with pytest.raises(ValueError, match="no key of the state dict matches"):
        model.set_state_dict({"module.strange": torch.ones(1)})
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())
    names = {"param_0": torch.ones(3, 3), "param_3": torch.ones(3)}
    with pytest.warns(UserWarning, match="missing"):
        model.set_state_dict(names, use_structured_name=False)
    assert torch.equal(target.encoder.weight, torch.ones(3, 3))
    assert torch.equal(target.top.bias, torch.ones(3))
