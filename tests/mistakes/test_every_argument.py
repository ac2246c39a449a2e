"""Each argument of each public function and class is made wrong once: the error names it, and says what it got.

Neighbours are also exchanged, and keywords passed that only a sibling has. The text has no internal name, and is none
of Python's own, such as "object has no attribute".
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import cache, reduce
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpfuse import DistributedDataParallel, DPFuseError, forget_stop
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
    "a text": ("no_such", r"no_such|\bstr\b", r"\bstr\b|PathLike|Any"),
    "a number": (-7.5, r"-7\.5|float", r"float|Any|ArrayLike"),
}
# Which annotations have a value of this type; another type has to be in the annotation itself, or one of its bases.
FITS = {
    "NoneType": r"None|Any",
    "bool": r"\bbool\b|Any",
    "int": r"\bint\b|float|Any|ArrayLike",
    "float": r"float|Any|ArrayLike",
    "str": r"\bstr\b|PathLike|Any",
    "function": r"Callable|Any",
    "list": r"list|Sequence|Iterable|Any|ArrayLike",
    "tuple": r"tuple|Sequence|Iterable|Any|ArrayLike",
    "dict": r"dict|Mapping|Any",
    "type": r"\btype\b|Callable|Any",
}

# Options that a signature does not show.
TAKES_ALSO = {
    "dpfuse.patch": {*RIGHT["dpfuse.patch"].arguments(Path())},
    "dpfuse.replicate": {*inspect.signature(DistributedDataParallel).parameters} - {"device_mesh"},
}
# What DataParallel and DistributedDataParallel call the same, but for broadcast_buffers, which the latter takes, too.
SAME = (("layers", "module"), ("group", "process_group"), ("comm_buffer_size", "bucket_cap_mb"))
# A keyword of another wrapper, and what the text says to write.
SAID = (
    *(("dpfuse.DataParallel", other, f"here it is {own}") for own, other in SAME),
    *(("dpfuse.paddle.DataParallel", other, f"here it is {own}") for own, other in SAME),
    *(("dpfuse.DistributedDataParallel", other, f"here it is {own}") for other, own in SAME),
    *(("dpfuse.replicate", other, f"here it is {own}") for other, own in SAME),
    *(("dpfuse.patch", other, f"pass {own} where the model is wrapped") for other, own in SAME),
    ("dpfuse.DataParallel", "forward_sync_buffers", "here it is broadcast_buffers"),
    ("dpfuse.DataParallel", "ignored_params", "which is one of replicate; leave it out, or use dpfuse.replicate"),
    ("dpfuse.DistributedDataParallel", "mesh", "here it is device_mesh"),
    ("dpfuse.replicate", "device_mesh", "here it is mesh"),
    ("dpfuse.patch", "mesh", "pass device_mesh where the model is wrapped"),
)


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
        yield from ((argument, wrong) for wrong in WRONG if not re.search(WRONG[wrong][2], outside(hint)))


def fits(value: Any, hint: str) -> bool:
    """Whether the annotation has this value."""
    kinds = type(value).__mro__[:1] if isinstance(value, bool) else type(value).__mro__[:-1]
    return any(re.search(FITS.get(kind.__name__, rf"\b{kind.__name__}\b|Any"), outside(hint)) for kind in kinds)


def outside(hint: str) -> str:
    """An annotation without what is in brackets: `Mapping[str, Any]` has a mapping, and not any object."""
    while (shorter := re.sub(r"\[[^\[\]]*\]", "", hint)) != hint:
        hint = shorter
    return hint


def exchanges(name: str, arguments: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield two neighbours that are passed by place, where one of the two then gets what it does not take."""
    places = [
        each
        for each in inspect.signature(public()[name]).parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD and each.name in arguments
    ]
    for one, other in pairwise(places):
        pair = ((one, other), (other, one))
        if any(not (to.name in TRUTH or fits(arguments[source.name], str(to.annotation))) for to, source in pair):
            yield one.name, other.name


def names(text: str, argument: str) -> bool:
    """Whether a text has the argument's name as a word of its own: `dtype` is not named where `dtypes` is."""
    return bool(re.search(rf"\b{argument}\b", text))


def words_of(value: Any) -> str:
    """What a text says that names this value: its type, or how it is written."""
    return rf"\b{type(value).__name__}\b|{re.escape(repr(value))}"


@cache
def keywords_of_siblings(name: str) -> list[str]:
    """What the other names of its module or class take, and the function itself does not."""
    place = name.rpartition(".")[0]
    own = {*inspect.signature(public()[name]).parameters, *TAKES_ALSO.get(name, ())}
    siblings = [one for other, one in public().items() if other.rpartition(".")[0] == place]
    taken = [each for one in siblings for each in inspect.signature(one).parameters.values()]
    named = [each.name for each in taken if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return sorted({each for each in named if each not in own and not each.startswith("_")} - {"self", "cls"})


def raised_by(call: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """The text of the error; an error of another class than a wrong argument has is not caught."""
    try:
        call(**arguments)
    except (TypeError, ValueError, DPFuseError, RuntimeError) as error:
        return str(error)
    finally:
        forget_stop()
    return "nothing is raised"


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of dpfuse.paddle run on one CPU device."""
    monkeypatch.setenv("CPU_NUM", "1")


@pytest.fixture(autouse=True)
def _no_wish_to_stop_is_left() -> Iterator[None]:
    yield
    forget_stop()


def test_each_public_name_is_tried_or_left_out_for_a_reason():
    names = public()
    assert [name for name in names if (name in RIGHT) == bool(reason_of(name))] == []
    assert [name for name in RIGHT if name not in names] == []
    assert [pattern for pattern in LEFT_OUT if not any(re.fullmatch(pattern, name) for name in names)] == []


@pytest.mark.usefixtures("group", "one_device")
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
        text = raised_by(RIGHT[name].function, RIGHT[name].arguments(folder) | {argument: value})
        if not names(text, argument) or not re.search(got, text) or INTERNAL.search(text):
            wrongly[f"{argument} is {wrong}"] = text
    assert wrongly == {}


@pytest.mark.usefixtures("group", "one_device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", RIGHT)
def test_two_neighbours_that_are_exchanged_are_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrongly = {}
    for number, (one, other) in enumerate(exchanges(name, RIGHT[name].arguments(tmp_path))):
        folder = tmp_path / str(number)
        folder.mkdir()
        right = RIGHT[name].arguments(folder)
        exchanged = {one: right[other], other: right[one]}
        text = raised_by(RIGHT[name].function, right | exchanged)
        told = any(names(text, each) and re.search(words_of(value), text) for each, value in exchanged.items())
        if not told or INTERNAL.search(text):
            wrongly[f"{one} and {other}"] = text
    assert wrongly == {}


@pytest.mark.usefixtures("group", "one_device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", RIGHT)
def test_a_keyword_that_only_a_sibling_has_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    right, wrongly = RIGHT[name].arguments(tmp_path), {}
    for keyword in keywords_of_siblings(name):
        text = raised_by(RIGHT[name].function, right | {keyword: None})
        if not re.search(rf"(unexpected keyword argument|got the option) '{keyword}'", text) or INTERNAL.search(text):
            wrongly[keyword] = text
    assert wrongly == {}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("name", "keyword", "remedy"), SAID)
def test_a_keyword_of_another_wrapper_has_a_name_here(name, keyword, remedy, tmp_path):
    text = raised_by(RIGHT[name].function, RIGHT[name].arguments(tmp_path) | {keyword: None})
    assert f"unexpected keyword argument '{keyword}'" in text
    assert remedy in text


@pytest.mark.usefixtures("group", "one_device")
@pytest.mark.filterwarnings("ignore")
def test_each_right_call_is_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, (name, call) in enumerate(RIGHT.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        if name not in ("dpfuse.spawn", "dpfuse.init_parallel_env"):  # a process, and a group that there is already
            call.function(**call.arguments(folder))
