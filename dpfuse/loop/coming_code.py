"""The code that a program may still run: the loops around its running lines, what lies behind these, and what it calls.

Some loops are wrong only if nothing else follows, and what follows can be an average of the weights in 500 steps. Their
source says so. It is read once, before a message, and can only prevent it.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from inspect import CO_OPTIMIZED, unwrap
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from dpfuse.engine.user_line import INSIDE, user_frame

__all__ = [
    "Lines",
    "Scope",
    "UnknownCodeError",
    "UnknownNamesError",
    "UnknownValueError",
    "coming_code",
    "running_lines",
    "value_of",
]

FUNCTIONS = 200  # that are read at most
UNSHARED = 3  # references to the names of a frame: the frame's, ours, and that of the call that counts them

Function = ast.FunctionDef | ast.AsyncFunctionDef
Lines = Mapping[tuple[int, CodeType], int]
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class UnknownCodeError(Exception):
    """The source of a function that runs is not there."""


class UnknownNamesError(UnknownCodeError):
    """The names of a function that runs must not be looked at."""


class UnknownValueError(Exception):
    """An expression has a value that is known only when it runs."""


class Scope:
    """A function, with the part of it that may still run.

    Args:
        function: the function, or the module.
        coming: the statements of it that may still run.
        names: values of names, as far as they are known. What these statements assign is not.

    Attributes:
        function: as above.
        coming: as above.
        names: as above.
    """

    def __init__(self, function: ast.AST, coming: Sequence[ast.stmt], names: Mapping[str, Any]) -> None:
        self.function = function
        self.coming = coming
        assigned = {
            node.id
            for statement in coming
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        self.names = {name: value for name, value in names.items() if name not in assigned}

    def calls(self) -> Iterator[ast.Call]:
        """Return the calls that may still be made."""
        for statement in self.coming:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    yield node


def running_lines(frame: FrameType | None) -> Lines:
    """Return the line of each function of the user that runs, by the id of its frame and its code.

    An id alone may be that of another function later. Frames themselves would keep the objects of the program alive.

    Args:
        frame: the innermost one.
    """
    lines: dict[tuple[int, CodeType], int] = {}
    while frame is not None:
        if not frame.f_code.co_filename.startswith(INSIDE):
            lines[id(frame), frame.f_code] = frame.f_lineno
        frame = frame.f_back
    return lines


def coming_code(frame: FrameType | None, made: Lines) -> list[Scope]:
    """Return what may still run with a model, in each function of the user that runs, and in those it calls.

    Args:
        frame: the innermost one.
        made: the lines that ran when the model was made, as of `running_lines`. What is around the function in which
            that happened belongs to other models, as in a loop over learning rates.

    Raises:
        UnknownCodeError: the source of the user's innermost function cannot be read, or the loop is that of a library,
            which may call anything of the user's.
        UnknownNamesError: a function keeps what `locals()` returns.
    """
    sources = Sources()
    scopes: list[Scope] = []
    running: dict[CodeType, dict[str, Any]] = {}
    frame, _ = user_frame(frame)
    if frame is None:
        raise UnknownCodeError
    innermost, loops = frame, 0
    while frame is not None:
        line = made.get((id(frame), frame.f_code), 0)
        if not frame.f_code.co_filename.startswith(INSIDE):
            try:
                function = sources.function_of(frame.f_code)
            except UnknownCodeError:
                if frame is innermost:
                    raise
                function = None  # what starts a process, such as `python -c`
            if function is None:
                loops += frame.f_code.co_name in COMPREHENSIONS
            elif keeps_its_names(function):
                raise UnknownNamesError
            else:
                names = running[frame.f_code] = names_in(frame)
                coming = coming_in(function.body, frame.f_lineno, line) or []
                loops += any(isinstance(node, LOOPS) and is_at(node, frame.f_lineno) for node in coming)
                scopes.append(Scope(function, coming, names))
        frame = None if line else frame.f_back
    if not loops:
        raise UnknownCodeError
    seen: set[CodeType] = set()
    for scope in scopes:  # which grows
        for call in scope.calls():
            called = function_called_by(call, scope)
            if called is not None and called[0].__code__ not in seen and len(seen) < FUNCTIONS:
                seen.add(called[0].__code__)
                scopes.extend(scope_of(*called, sources, running))
    return scopes


def keeps_its_names(function: ast.AST) -> bool:
    """Whether a function keeps what `locals()` returns.

    Before Python 3.13 that is the dict which any look at the names of its frame fills again.
    """
    if sys.version_info >= (3, 13) or isinstance(function, ast.Module):
        return False
    calls: set[ast.expr] = set()
    passing: set[ast.expr] = set()  # what is not kept itself, such as `**locals()`
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and not node.args and not node.keywords and isinstance(node.func, ast.Name):
            calls |= {node} if node.func.id in ("locals", "vars") else set()
        elif isinstance(node, ast.Attribute | ast.Subscript) or (isinstance(node, ast.keyword) and node.arg is None):
            passing.add(node.value)
        elif isinstance(node, ast.Dict):
            passing.update(value for key, value in zip(node.keys, node.values, strict=True) if key is None)
    return not calls <= passing


def names_in(frame: FrameType) -> dict[str, Any]:
    """Return the values of the names of a function that runs. Leaves nothing in its frame."""
    own = frame.f_locals
    names = {**frame.f_globals, **own}
    # Python before 3.13 would keep this copy, and what it holds, as long as the function runs. Other code may have it.
    if frame.f_code.co_flags & CO_OPTIMIZED and isinstance(own, dict) and sys.getrefcount(own) <= UNSHARED:
        own.clear()
    return names


class Sources:
    """The files of the user's functions, parsed."""

    def __init__(self) -> None:
        self._trees: dict[str, ast.Module] = {}

    def function_of(self, code: CodeType) -> Function | ast.Module | None:
        """Return the function with this code; None for a lambda or a comprehension, which have no statements.

        Raises:
            UnknownCodeError: its source cannot be read.
        """
        tree = self._tree_of(code.co_filename)
        if code.co_name == "<module>":
            return tree
        for node in ast.walk(tree):
            if isinstance(node, Function) and node.name == code.co_name and first_line(node) == code.co_firstlineno:
                return node
        if code.co_name.startswith("<"):
            return None
        raise UnknownCodeError

    def _tree_of(self, path: str) -> ast.Module:
        if path not in self._trees:
            lines = linecache.getlines(path)
            if not lines:
                raise UnknownCodeError
            try:
                self._trees[path] = parsed("".join(lines))
            except (SyntaxError, ValueError, SystemError) as error:
                raise UnknownCodeError from error
        return self._trees[path]


def parsed(source: str) -> ast.Module:
    """Return the tree of a module.

    Python 3.11 may miscount the depth of a tree, seldom, and not again the next time (python/cpython#106905).
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def first_line(function: Function) -> int:
    """Return the line with which the code of a function begins: that of its first decorator, if it has one."""
    return min(node.lineno for node in (function, *function.decorator_list))


def coming_in(body: Sequence[ast.stmt], line: int, made: int) -> list[ast.stmt] | None:
    """Return the statements of a block that may run once `line` of it runs; None if the line is not in the block.

    A loop in which the line `made` lies makes another model each time.
    """
    for place, statement in enumerate(body):
        if is_at(statement, line):
            again = is_at(statement, made)
            if isinstance(statement, LOOPS) and not again:
                return list(body[place:])
            blocks = [block for _, block in ast.iter_fields(statement) if isinstance(block, list)]
            blocks += [each.body for each in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))]
            found = (coming_in(block, line, made) for block in blocks if block and isinstance(block[0], ast.stmt))
            inside: list[ast.stmt] = next((each for each in found if each is not None), [])
            behind = [] if again and isinstance(statement, LOOPS) else body[place + 1 :]
            return [*inside, *getattr(statement, "finalbody", ()), *behind]
    return None


def is_at(statement: ast.stmt, line: int) -> bool:
    """Whether a statement has this line."""
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def function_called_by(call: ast.Call, scope: Scope) -> tuple[FunctionType, Any] | None:
    """Return the function of the user that a call runs, and the object whose method it is; None if it is unknown."""
    try:
        called = unwrapped(value_of(call.func, scope.names))
    except UnknownValueError:
        return None
    owner = None
    if isinstance(called, MethodType):
        owner, called = called.__self__, called.__func__
    if not isinstance(called, FunctionType) or called.__code__.co_filename.startswith(INSIDE):
        return None
    return called, owner


def scope_of(
    called: FunctionType, owner: Any, sources: Sources, running: Mapping[CodeType, Mapping[str, Any]]
) -> Iterator[Scope]:
    """Return a function as a whole, if its source is there. Arguments are known if it runs now."""
    code = called.__code__
    try:
        function = sources.function_of(code)
    except UnknownCodeError:
        return
    if function is None:
        return
    names = {**called.__globals__}
    for name, cell in zip(code.co_freevars, called.__closure__ or (), strict=True):
        names.update((name, value) for value in contents_of(cell))
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for name in arguments:
        names.pop(name, None)
    if owner is not None and arguments:
        names[arguments[0]] = owner
    yield Scope(function, function.body, running.get(code, names))


def contents_of(cell: Any) -> Iterator[Any]:
    """Return what a cell holds, if that was assigned yet."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def unwrapped(value: Any) -> Any:
    """Return the function behind a partial, a decorator, a class, or an object that can be called."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, FunctionType):
        return unwrap(value)
    if isinstance(value, type):
        init = attribute_of(value, "__init__")
        return MethodType(init, value) if isinstance(init, FunctionType) else value
    call = type(value).__dict__.get("__call__")
    return MethodType(call, value) if isinstance(call, FunctionType) else value


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of names, attributes and constant keys, without running code of the program.

    Args:
        node: the expression.
        names: values of names.

    Raises:
        UnknownValueError: it has other parts, or a name has no known value.

    Example:
        >>> import ast
        >>> value_of(ast.parse("pair[1]", mode="eval").body, {"pair": (3, 4)})
        4
    """
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Attribute):
        return attribute_of(value_of(node.value, names), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = value_of(node.value, names)
        if type(owner) in (list, tuple, dict):
            try:
                return owner[node.slice.value]
            except (LookupError, TypeError) as error:
                raise UnknownValueError from error
    raise UnknownValueError


def attribute_of(owner: Any, name: str) -> Any:
    """Return an attribute that no code computes."""
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own[name]
    if isinstance(owner, ModuleType):
        raise UnknownValueError
    bases = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    for base in bases:
        if name in base.__dict__:
            found = base.__dict__[name]
            if isinstance(found, staticmethod):
                return found.__func__
            if isinstance(found, classmethod):
                return MethodType(found.__func__, owner)
            if isinstance(found, FunctionType) and not isinstance(owner, type):
                return MethodType(found, owner)
            return found
    raise UnknownValueError
