"""May an optimizer that has not stepped yet still do so? Then it is no mistake that its gradients are averaged."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpfuse.loop.coming_code import (
    Lines,
    Scope,
    UnknownCodeError,
    UnknownNamesError,
    UnknownValueError,
    coming_code,
    value_of,
)

__all__ = ["may_step"]

OTHERS = re.compile(r"sched|prof|ema$", re.I)  # names of objects that have a step() and are no optimizers


def may_step(frame: FrameType | None, made: Lines, waiting: Collection[Optimizer]) -> bool:
    """Whether the program has code that steps one of these optimizers, or that gives one more parameters.

    Args:
        frame: of the step of another optimizer.
        made: the lines that ran when the model was made.
        waiting: optimizers that have not stepped. If there is none, one that is made later may step.

    Returns:
        True also where that cannot be seen: an expression whose value is known only later may be any of them.
    """
    try:
        scopes = coming_code(frame, made)
    except UnknownNamesError:
        return True
    except UnknownCodeError:
        return bool(waiting)
    return any(steps(call, scope, waiting) for scope in scopes for call in scope.calls())


def steps(call: ast.Call, scope: Scope, waiting: Collection[Optimizer]) -> bool:
    """Whether a call may step one of these optimizers, or change what optimizers have."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "add_param_group":
        return True
    try:
        called = value_of(call.func, scope.names)
    except UnknownValueError:
        called = None
    if isinstance(called, type) and issubclass(called, Optimizer):
        return True
    if not waiting or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(may_be(each, scope, waiting) for each in (call.func.value, *arguments))


def may_be(node: ast.expr, scope: Scope, waiting: Collection[Optimizer]) -> bool:
    """Whether an expression may have one of these optimizers as its value."""
    try:
        value: Any = value_of(node, scope.names)
    except UnknownValueError:
        elements = elements_of(node, scope)
        if elements is not None:
            return any(is_or_holds(each, waiting) for each in elements)
        return not OTHERS.search(ast.unparse(node).rpartition(".")[2]) and not isinstance(node, ast.Constant)
    return is_or_holds(value, waiting)


def elements_of(node: ast.expr, scope: Scope) -> list[Any] | None:
    """Return the values that a name takes in a loop over a list, a tuple or the values of a dict; None if unknown."""
    loops = [each for each in ast.walk(scope.function) if isinstance(each, ast.For | ast.comprehension)]
    found = [loop.iter for loop in loops if isinstance(node, ast.Name) and ast.dump(loop.target) == stored(node)]
    elements: list[Any] = []
    for source in found:
        values = (
            isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "values"
        )
        try:
            owner = value_of(source.func.value if values else source, scope.names)  # type: ignore[attr-defined]
        except UnknownValueError:
            return None
        if type(owner) is dict and values:
            elements += owner.values()
        elif type(owner) in (list, tuple):
            elements += owner
        else:
            return None
    return elements if found else None


def stored(node: ast.Name) -> str:
    """Return how a name looks where it is assigned."""
    return ast.dump(ast.Name(node.id, ast.Store()))


def is_or_holds(value: Any, waiting: Collection[Optimizer]) -> bool:
    """Whether an object is one of these optimizers, or holds one."""
    if isinstance(value, LRScheduler):
        return False
    return any(value is each or any(each is held for held in contents(value)) for each in waiting)


def contents(value: Any) -> list[Any]:
    """Return the optimizers that an object holds, also in lists and dicts, as the one of a library wraps some."""
    held: list[Any] = []
    for each in getattr(value, "__dict__", {}).values():
        held += each.values() if type(each) is dict else each if type(each) in (list, tuple) else [each]
    return [each for each in held if isinstance(each, Optimizer)]
