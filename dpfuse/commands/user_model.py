"""A user's own model, given as `module:factory`. Knows no process group."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

import dpfuse
from dpfuse.engine.user_line import INSIDE
from dpfuse.errors import DPFuseError

__all__ = ["build", "find_factory"]


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
            f"{place} is of type {type(factory).__name__}; expected a function without arguments that returns a module"
        )
    return factory  # type: ignore[no-any-return]


def build(place: str) -> nn.Module:
    """Call the factory and check its result. Of a tuple, such as a module with its loss, take the first part.

    Raises:
        DPFuseError: there is no such factory, it needs arguments or raises, or its result is something else.

    Example:
        >>> from dpfuse.commands.user_model import build
        >>> build("torch.nn:PReLU")
        PReLU(num_parameters=1)
    """
    factory = find_factory(place)
    if missing := _required(factory):
        raise DPFuseError(
            f"{place} needs the arguments {', '.join(missing)}; expected a function without arguments. Give them "
            "defaults, or wrap it in a function that passes them"
        )
    with _user_code(place, "the factory"):
        made = factory()
    module = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(module, nn.Module):
        raise DPFuseError(f"{place} returned a module of type {type(module).__name__}; expected a torch.nn.Module")
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
    return module


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
