"""Will a backward behind a loop of local steps be averaged? Then they are an inner loop, as of meta-learning."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from types import FrameType

from dpfuse.loop.coming_code import LOOPS, Lines, Scope, UnknownCodeError, coming_code

__all__ = ["average_may_come"]

SWITCH = "require_backward_grad_sync"
WITHOUT_BACKWARD = ("no_grad", "inference_mode")


def average_may_come(frame: FrameType | None, made: Lines) -> bool:
    """Whether the program has a loop with `no_sync()` and, outside of that loop, a forward and a backward without it.

    Inside the loop such a backward says nothing: it has not run in many steps.

    Args:
        frame: of a step.
        made: the lines that ran when the model was made.
    """
    try:
        scopes = coming_code(frame, made)
    except UnknownCodeError:
        return True
    if any(isinstance(node, ast.Attribute) and node.attr == SWITCH for scope in scopes for node in nodes_of(scope)):
        return False
    inner = [found for scope in scopes for found in local_loops(scope.coming, None)]
    owners = {ast.unparse(owner) for _, owner, _ in inner}
    if not all(may_have_backward(context, owners) for _, _, context in inner):
        return False  # the forward is in a function that it calls, which then looks as if it were outside
    loops = {loop for loop, _, _ in inner}
    return any(averages(scope, owners, loops) for scope in scopes)


def nodes_of(scope: Scope) -> Iterator[ast.AST]:
    """Return all parts of the code that may still run."""
    for statement in scope.coming:
        yield from ast.walk(statement)


def local_loops(body: Sequence[ast.AST], loop: ast.AST | None) -> Iterator[tuple[ast.AST, ast.expr, ast.With]]:
    """Return the innermost loop around each `with model.no_sync():`, with the model, and the context itself."""
    for node in body:
        if isinstance(node, ast.With):
            for item in node.items:
                owner = owner_of(item.context_expr)
                if owner is not None and loop is not None:
                    yield loop, owner, node
        yield from local_loops([*ast.iter_child_nodes(node)], node if isinstance(node, LOOPS) else loop)


def owner_of(node: ast.expr) -> ast.expr | None:
    """Return the model of `model.no_sync()`; None for another expression."""
    if not isinstance(node, ast.Call) or node.args or node.keywords or not isinstance(node.func, ast.Attribute):
        return None
    return node.func.value if node.func.attr == "no_sync" else None


def may_have_backward(context: ast.AST, owners: set[str]) -> bool:
    """Whether a context has a forward of one of these models in it, or a backward."""
    called = [call.func for call in ast.walk(context) if isinstance(call, ast.Call)]
    return any(ast.unparse(each) in owners or is_backward(each) for each in called)


def is_backward(called: ast.expr) -> bool:
    """Whether a function that is called is a backward."""
    return isinstance(called, ast.Attribute) and called.attr == "backward"


def averages(scope: Scope, owners: set[str], loops: set[ast.AST]) -> bool:
    """Whether a function has a forward of one of these models, and a backward, outside of these loops."""
    calls = [*calls_outside(scope.coming, loops)]
    forward = any(ast.unparse(call.func) in owners for call in calls)
    return forward and any(is_backward(call.func) for call in calls)


def calls_outside(body: Sequence[ast.AST], loops: set[ast.AST]) -> Iterator[ast.Call]:
    """Return the calls that are in none of these loops, and in no context that ends averages or gradients."""
    for node in body:
        if node in loops:
            continue
        if isinstance(node, ast.With):
            text = " ".join(ast.unparse(item.context_expr) for item in node.items)
            if "no_sync" in text or any(word in text for word in WITHOUT_BACKWARD):
                continue
        if isinstance(node, ast.Call):
            yield node
        yield from calls_outside([*ast.iter_child_nodes(node)], loops)
