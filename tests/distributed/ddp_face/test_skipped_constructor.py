"""Subclasses that skip the wrapper's constructor and wrap parts of the module by themselves, as in mmengine."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Torch

import dpfuse
from dpfuse import DPFuseError

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def derived(base: type) -> type:
    """A class that wraps the parts with parameters by itself."""

    class Separate(base):
        def __init__(self, module: nn.Module) -> None:
            super(base, self).__init__()
            self.module = module
            for name, part in list(module.named_children()):
                if any(True for _ in part.parameters()):
                    module._modules[name] = base(part)

    Separate.__qualname__ = f"Separate{base.__module__}"
    return Separate


CALLS: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "zero_grad": lambda model: model.zero_grad(),
    "zero_grad, kept": lambda model: model.zero_grad(set_to_none=False),
    "train": lambda model: model.train().training,
    "eval": lambda model: [part.training for part in model.eval().modules()],
    "named_parameters": lambda model: [value.tolist() for _, value in model.named_parameters()],
    "named_buffers": lambda model: [value.tolist() for _, value in model.named_buffers()],
    "modules": lambda model: len(list(model.modules())),
    "children": lambda model: [name for name, _ in model.named_children()],
    "to": lambda model: next(model.to(torch.float64).parameters()).dtype,
    "double": lambda model: next(model.double().parameters()).dtype,
    "cpu": lambda model: next(model.cpu().parameters()).device,
    "requires_grad_": lambda model: any(param.requires_grad for param in model.requires_grad_(False).parameters()),
    "apply": lambda model: len(list(model.apply(lambda part: None).parameters())),
    "get_submodule": lambda model: type(model.get_submodule("module.2")),
    "get_parameter": lambda model: model.get_parameter("module.0.module.weight").tolist(),
    "register_buffer": lambda model: (model.register_buffer("more", torch.ones(1)), model.more.item())[1],
    "register_forward_hook": lambda model: model.register_forward_hook(lambda *_: None) and None,
    "share_memory": lambda model: model.share_memory() and None,
    "get_extra_state": lambda model: hasattr(model, "get_extra_state"),
    "set the switch": lambda model: (setattr(model, "require_backward_grad_sync", False), "set")[1],
    "forward": lambda model: model(torch.ones(3, 4)),
    "forward, no_grad": lambda model: torch.no_grad()(model)(torch.ones(3, 4)),
    "no_sync": lambda model: model.no_sync().__enter__(),
    "read the switch": lambda model: model.require_backward_grad_sync,
    "reducer": lambda model: model.reducer,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}
OF_DDP: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: [(name, value.tolist()) for name, value in model.state_dict().items()],
    "load_state_dict": lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "load another": lambda model: model.load_state_dict({}, strict=False).missing_keys,
    "join": lambda model: model.join().__enter__(),
    "join_hook": lambda model: model.join_hook(),
    "register_comm_hook": lambda model: model.register_comm_hook(None, lambda state, bucket: bucket),
}


def outcome(call: Callable[[Any], Any], model: nn.Module) -> tuple[bool, Any]:
    try:
        return True, call(model)
    except Exception as error:
        return False, error


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:there is no process group")
@pytest.mark.parametrize(
    ("face", "name"), [*[(face, name) for face in FACES for name in CALLS], *[("ddp", name) for name in OF_DDP]]
)
def test_what_works_with_torchs_class_works_here_and_the_rest_says_why_not(face, name):
    call = (CALLS | OF_DDP)[name]
    works, theirs = outcome(call, derived(Torch)(net()))
    ours_works, ours = outcome(call, derived(FACES[face])(net()))
    assert ours_works == works, ours
    if not works:
        assert isinstance(ours, DPFuseError)
        assert f"Separate has not run the constructor of dpfuse.{FACES[face].__name__}, expected" in str(ours)
        assert "super().__init__(module)" in str(ours)
        assert "override this method" in str(ours)
    elif name == "repr":
        assert "constructor skipped: averages no gradients itself" in ours
        assert "buckets=" in ours  # of the parts
    else:
        assert ours == theirs


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("face", FACES)
def test_a_state_dict_goes_from_one_to_the_other(face):
    kind = derived(FACES[face])
    source, target = kind(net()), kind(net())
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.add_(3)
    target.load_state_dict(source.state_dict())
    for name, value in target.state_dict().items():
        assert torch.equal(value, source.state_dict()[name])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("face", FACES)
def test_a_class_that_hands_unknown_names_to_its_module_gets_the_same_error(face):
    class Delegating(derived(FACES[face])):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "module":
                    raise
                return getattr(self.module, name)

    model = Delegating(net())
    model.zero_grad()
    assert "constructor skipped" in repr(model)
    for call in (lambda: model(torch.ones(3, 4)), lambda: model.no_sync().__enter__()):
        with pytest.raises(DPFuseError, match="Delegating has not run the constructor"):
            call()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("base", [Torch, *FACES.values()])
def test_a_switch_that_the_class_sets_by_itself_works_as_with_torchs_class(base):
    model = derived(base)(net())
    model.require_backward_grad_sync = True
    with model.no_sync():
        assert model.require_backward_grad_sync is False
    assert model.require_backward_grad_sync is True


def trained(rank: int, base: type) -> list[Tensor]:
    """Two steps of two batches, the first of each inside no_sync()."""

    class Trained(derived(base)):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.module(inputs)

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            with ExitStack() as parts:
                for part in self.module:
                    if hasattr(part, "no_sync"):
                        parts.enter_context(part.no_sync())
                yield

    model = Trained(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(2):
        with model.no_sync():
            model(torch.randn(8, 4)).square().mean().backward()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_separately_wrapped_parts_train_as_with_torchs_class(rank: int, size: int) -> None:
    expected = trained(rank, Torch)
    for name, face in FACES.items():
        for param, other in zip(trained(rank, face), expected, strict=True):
            assert torch.equal(param, other), name


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("face", FACES)
def test_a_wrapper_that_ran_its_constructor_shows_none_of_this(face):
    model = FACES[face](net())
    assert "skipped" not in repr(model)
    assert model.require_backward_grad_sync is True
    assert model(torch.ones(3, 4)).shape == (3, 2)
