"""Each argument of each public function and class is made wrong once: the error names it, and says what it got.

It has no internal name, and is none of Python's own, such as "object has no attribute".
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dpfuse import DPFuseError, forget_stop
from tests.mistakes.every_argument import LEFT_OUT, RIGHT, TRUTH

STORED = Path(__file__).parents[1] / "golden" / "public_names.json"
INTERNAL = re.compile(
    r"(?<![\w.])_[a-z]\w*|object has no attribute|object is not|not supported between|unsupported operand"
    r"|has no len\(\)|could not convert|positional argument|invalid data type"
)


class Stranger:
    """An object that no argument takes."""


# What is passed, of which words one is to be in the text, and which annotations have it.
WRONG: dict[str, tuple[Any, str, str]] = {
    "a stranger": (Stranger(), r"Stranger", r"(?!)"),
    "None": (None, r"None", r"None|Any"),
    "a text": ("no_such", r"no_such|\bstr\b", r"\bstr\b|PathLike|Any|Iterable\[Sample\]"),
    "a number": (-7.5, r"-7\.5|float", r"float|Any|ArrayLike"),
}


@cache
def public() -> dict[str, Callable[..., Any]]:
    """What the stored names lead to, without those that take nothing, and each function once, but for right calls."""
    found: dict[str, Callable[..., Any]] = {}
    for module, names in json.loads(STORED.read_text()).items():
        for name, text in names.items():
            if "(" not in text or text.startswith("property") or text.endswith("(...)"):
                continue
            one = reduce(getattr, name.split("."), import_module(module))
            takes = [key for key in inspect.signature(one).parameters if key not in ("self", "cls")]
            known = any(same(one, other) for other in found.values())
            if takes and (not known or f"{module}.{name}" in RIGHT):
                found[f"{module}.{name}"] = one
    return found


def same(one: Any, other: Any) -> bool:
    """Whether these are the same function; a class method is made anew each time it is looked up."""
    return one is other or (inspect.ismethod(one) and one == other)


def reason_of(name: str) -> str:
    """Why a name is left out; empty if it is not."""
    return next((reason for pattern, reason in LEFT_OUT.items() if re.fullmatch(pattern, name)), "")


def cases(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield argument and wrong value; values that the annotation has are right."""
    parameters = inspect.signature(public()[name]).parameters
    for argument in RIGHT[name].arguments(folder):
        if argument in (*RIGHT[name].free, *TRUTH):
            continue
        hint = str(parameters[argument].annotation) if argument in parameters else "Any"
        yield from ((argument, wrong) for wrong in WRONG if not re.search(WRONG[wrong][2], hint))


def test_each_public_name_is_tried_or_left_out_for_a_reason():
    names = public()
    assert [name for name in names if (name in RIGHT) == bool(reason_of(name))] == []
    assert [name for name in RIGHT if name not in names] == []
    assert [pattern for pattern in LEFT_OUT if not any(re.fullmatch(pattern, name) for name in names)] == []


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", RIGHT)
def test_each_wrong_argument_is_named_with_what_was_got(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrongly = {}
    for number, (argument, wrong) in enumerate(cases(name, tmp_path)):
        folder = tmp_path / str(number)
        folder.mkdir()
        value, got, _ = WRONG[wrong]
        try:
            RIGHT[name].function(**RIGHT[name].arguments(folder) | {argument: value})
            text = "nothing is raised"
        except (TypeError, ValueError, DPFuseError, RuntimeError) as error:
            text = str(error)
        finally:
            forget_stop()
        if argument not in text or not re.search(got, text) or INTERNAL.search(text):
            wrongly[f"{argument} is {wrong}"] = text
    assert wrongly == {}


def test_each_right_call_is_right(tmp_path, group):
    for number, (name, call) in enumerate(RIGHT.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        if name not in ("dpfuse.spawn", "dpfuse.init_parallel_env"):  # a process, and a group that there is already
            call.function(**call.arguments(folder))
