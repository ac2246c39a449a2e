"""A user's own model and loss, given as `module:factory`. Knows no process group."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

import dpfuse
from dpfuse.engine.user_line import INSIDE
from dpfuse.errors import DPFuseError

__all__ = ["Loss", "Target", "build", "find_factory"]

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Target:
    """The result of a factory, checked.

    Args:
        place: `module:factory`.
        module: has a parameter to train.
        loss: runs the module, or a wrapper around it, on one batch, and returns a scalar.
    """

    place: str
    module: nn.Module
    loss: Loss

    def backward(self, model: nn.Module) -> None:
        """Run one forward and backward of the module, or of a wrapper around it."""
        with _user_code(self.place, "the loss"):
            value = self.loss(model)
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
            raise DPFuseError(
                f"the loss of {self.place} returned {_in_words(value)}; expected a scalar tensor with a gradient, "
                "computed by the model that it is called with, such as `lambda model: model(batch).square().mean()`"
            )
        with _user_code(self.place, "backward() of the loss"):
            value.backward()

    def step(self, model: nn.Module) -> None:
        """Run one forward and backward, then set the gradients to None; nothing is trained."""
        self.backward(model)
        for param in self.module.parameters():
            param.grad = None


def find_factory(place: str) -> Callable[[], Any]:
    """Return the function at `place`, imported from the current folder or from `sys.path`.

    Raises:
        DPFuseError: `place` is not of the form `module:factory`, or names nothing that can be called; the import of
            its module raised.

    Example:
        >>> from dpfuse.commands.user_model import find_factory
        >>> find_factory("torch.nn:Identity")()
        Identity()
    """
    name, _, function = place.partition(":")
    if name.endswith(".py") or "/" in name:
        name_of_module = name.removesuffix(".py").strip("./").replace("/", ".")
        raise DPFuseError(
            f"{place!r} names a file; expected a module, importable from here: {name_of_module}:{function or 'build'}"
        )
    if not (name and function):
        raise DPFuseError(f"got {place!r}, expected module:factory, such as mymodel:build")
    # sys.path begins with the folder of a console script, but with the current folder under `python -m`.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    with _user_code(place, f"the import of {name}"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that the user's module imports is missing
            raise DPFuseError(
                f"{place}: there is no module {error.name!r} in {os.getcwd()} or on the Python path; run this where "
                f"`import {name}` works"
            ) from None
    factory = getattr(module, function, None)
    if factory is None:
        close = difflib.get_close_matches(function, vars(module), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DPFuseError(f"{place}: module {name!r} has no {function!r}{hint or '; expected a function'}")
    if not callable(factory):
        raise DPFuseError(
            f"{place} is of type {type(factory).__name__}; expected a function without arguments that returns "
            "(module, loss)"
        )
    return factory  # type: ignore[no-any-return]


def build(place: str, device: torch.device | str = "cpu", *, needs_loss: bool = True) -> Target:
    """Call the factory and check its result.

    Args:
        place: `module:factory`.
        device: of the tensors for which the factory names none.
        needs_loss: False accepts a module alone.

    Raises:
        DPFuseError: there is no such factory, it needs arguments or raises, or its result is something else.

    Example:
        >>> from dpfuse.commands.user_model import build
        >>> build("torch.nn:PReLU", needs_loss=False).module
        PReLU(num_parameters=1)
    """
    factory = find_factory(place)
    if missing := _required(factory):
        raise DPFuseError(
            f"{place} needs the arguments {', '.join(missing)}; expected a function without arguments. Give them "
            "defaults, or wrap it in a function that passes them"
        )
    with _user_code(place, "the factory"), torch.device(device):
        made = factory()
    module, loss = made if isinstance(made, (tuple, list)) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise DPFuseError(f"{place} returned {_in_words(made)}; expected (module, loss) with a torch.nn.Module")
    if loss is None and needs_loss:
        raise DPFuseError(
            f"{place} returned no loss, only a {type(module).__name__}; expected (module, loss), where loss(model) "
            "runs the model on one batch and returns a scalar"
        )
    if loss is not None and not callable(loss):
        raise DPFuseError(
            f"{place} returned a loss of type {type(loss).__name__}; expected a function that takes the model and "
            "returns a scalar, such as `lambda model: model(batch).square().mean()`"
        )
    lazy = next((name for name, param in module.named_parameters() if is_lazy(param)), None)
    if lazy is not None:
        raise DPFuseError(f"{place}: parameter {lazy!r} has no shape yet; expected the model after a first forward")
    if isinstance(module, (DistributedDataParallel, dpfuse.DataParallel)):
        raise DPFuseError(f"{place} returned a {type(module).__name__}; expected the module that it wraps")
    if not any(param.requires_grad for param in module.parameters()):
        raise DPFuseError(
            f"{place}: the {type(module).__name__} has no parameter with requires_grad=True; expected something to "
            "train"
        )
    return Target(place, module, loss or _no_loss)


@contextmanager
def _user_code(place: str, what: str) -> Iterator[None]:
    """Turn an exception of the user's code into a DPFuseError that shows only the user's lines."""
    try:
        yield
    except DPFuseError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(INSIDE)]
        lines = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)]).rstrip()
        raise DPFuseError(
            f"{place}: {what} raised {type(error).__name__}, expected no exception. Correct it here:\n{lines}"
        ) from error


def _required(factory: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a call must pass; none where that cannot be known."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of some functions written in C
        return []
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in fixed]


def _in_words(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_in_words, value))})"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without gradient'}"
    return type(value).__name__


def _no_loss(model: nn.Module) -> Tensor:
    raise AssertionError("only a plan was asked for")
