"""Does the program average weights over the ranks by itself, later? Then local steps are what it wants."""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Container, Iterable, Iterator
from types import FrameType

from dpfuse.loop.coming_code import Lines, Scope, UnknownCodeError, coming_code

__all__ = ["weights_may_be_averaged"]

AVERAGERS = {
    "torch.distributed.algorithms.model_averaging.averagers": "ModelAverager",
    "accelerate.local_sgd": "LocalSGD",
}
WEIGHTS = re.compile(r"param|state_dict|(^|_)weights?$")
SENDING = re.compile(r"all_?reduce|all_?gather|broadcast|^i?reduce|sync|i?send|i?recv|p2p", re.I)
AVERAGING = re.compile(r"average|aggregate", re.I)
OF_TIME = re.compile(r"(^|[._])(ema|swa)(?![a-z])|moving|exponential|polyak", re.I)  # such averages stay on a rank
NUMBERS = re.compile(r"^[A-Z]|norm|clip|numel")  # calls that return no weights: constructors, and numbers
# Calls that make a number, or a tensor of numbers, of what has no weights in it.
COUNTS = re.compile(r"^(len|int|float|sum|count\w*|numel|size|item|(as_|new_)?(tensor|zeros|ones|full)|\w+Tensor)$")


def weights_may_be_averaged(frame: FrameType | None, made: Lines) -> bool:
    """Whether it can be seen that weights are averaged, or not be seen that they are not.

    The source is searched for a call that sends something, such as `all_reduce`, of what comes from `parameters()` or
    the like. A loss that is averaged for a log is none.

    Args:
        frame: of the step.
        made: the lines that ran when the model was made.
    """
    if has_averager():
        return True
    try:
        scopes = coming_code(frame, made)
    except UnknownCodeError:
        return True
    senders, known = names_of_senders(scopes)
    return any(sends_weights(scope, senders, known) for scope in scopes)


def has_averager() -> bool:
    """Whether the program has an object of a library that averages weights every few steps."""
    modules = {sys.modules[module]: name for module, name in AVERAGERS.items() if module in sys.modules}
    classes = tuple(getattr(module, name) for module, name in modules.items())
    return bool(classes) and any(issubclass(type(each), classes) for each in gc.get_objects())


def last_name(node: ast.expr) -> str:
    """Return the name of a function without its module; empty if it has none."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_of_senders(scopes: Iterable[Scope]) -> tuple[set[str], set[str]]:
    """Return the names of functions that make such a call, or call one of these; and those of all functions."""
    called = {getattr(scope.function, "name", ""): [call.func for call in scope.calls()] for scope in scopes}
    senders: set[str] = set()
    while True:
        # A function that is there is judged by what it does, and not by its name: `moving_average` need not send.
        more = {name for name, calls in called.items() if any(is_sender(each, senders, called) for each in calls)}
        if more <= senders:
            return senders, set(called)
        senders |= more


def sends_weights(scope: Scope, senders: set[str], known: set[str]) -> bool:
    """Whether weights are an argument of a call that sends, or of a function that makes such a call."""
    weights, numbers = names_of_weights(scope.function)
    return any(
        is_of(argument, weights, numbers)
        for call in scope.calls()
        if is_sender(call.func, senders, known)
        for argument in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def is_sender(called: ast.expr, senders: set[str], known: Container[str]) -> bool:
    """Whether a function that is called may send something: one that is not `known`, by its name and its object's."""
    name = last_name(called)
    if name in known:
        return name in senders
    averages = AVERAGING.search(name) and not OF_TIME.search(ast.unparse(called))
    return bool(SENDING.search(name) or averages)


def names_of_weights(function: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names of a function that hold weights, or what is computed from them; and those of mere numbers."""
    weights: set[str] = set()
    assigned = [(set(names_in(target)), value) for target, value in assignments_in(function)]
    numbers: set[str] = set()
    for _ in range(3):  # names are assigned from names
        numbers = {name for names, value in assigned if is_number(value, numbers) for name in names}
        numbers -= {name for names, value in assigned if not is_number(value, numbers) for name in names}
    for _ in range(3):
        for names, value in assigned:
            if is_of(value, weights, numbers):
                weights |= names
    return weights, numbers


def is_number(node: ast.AST, numbers: set[str]) -> bool:
    """Whether an expression is a number, or some, such as how many tokens a batch has; as far as it can be seen."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Name):
        return node.id in numbers
    if isinstance(node, ast.BinOp):
        return is_number(node.left, numbers) and is_number(node.right, numbers)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand, numbers)
    if isinstance(node, ast.Tuple | ast.List):
        return all(is_number(each, numbers) for each in node.elts)
    if not isinstance(node, ast.Call):
        return False
    if COUNTS.search(last_name(node.func)):
        return not any(is_of(child, set(), numbers) for child in ast.iter_child_nodes(node))
    return isinstance(node.func, ast.Attribute) and is_number(node.func.value, numbers)  # such as clone() and to()


def names_in(target: ast.AST) -> Iterator[str]:
    """Return the names and attributes that an assignment changes."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield target.attr
    elif isinstance(target, ast.Subscript | ast.Starred):
        yield from names_in(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from names_in(element)


def assignments_in(function: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Return what is assigned where, also by loops."""
    inner = isinstance(function, ast.Module)  # whose functions have names of their own
    nodes = list(ast.iter_child_nodes(function))
    for node in nodes:  # which grows
        if not (inner and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)):
            nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield node.target, node.iter


def is_of(node: ast.AST, weights: set[str], numbers: set[str]) -> bool:
    """Whether an expression has something of weights in it."""
    if isinstance(node, ast.Call) and NUMBERS.search(last_name(node.func)):
        return False
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if name in weights or (name and name not in numbers and WEIGHTS.search(name)):
        return True
    return any(is_of(child, weights, numbers) for child in ast.iter_child_nodes(node))
