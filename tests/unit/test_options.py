"""The options of both wrappers: declared once, and the same in signatures, docstrings, checks and agreement."""

from __future__ import annotations

import inspect
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

import dpfuse
import dpfuse.paddle
from dpfuse.model.check import describe_options
from dpfuse.model.options import CommonOptions, SyncOptions, filled

FACES = [dpfuse.DataParallel, dpfuse.DistributedDataParallel, dpfuse.paddle.DataParallel]
DECLARED = {name: get_args(hint)[1] for name, hint in get_type_hints(CommonOptions, include_extras=True).items()}
faces = pytest.mark.parametrize("face", FACES, ids=lambda face: face.__module__)


def options_with(**given: object) -> SyncOptions:
    return SyncOptions(25, 1, False, True, False, filled(given, dpfuse.DataParallel))


@faces
def test_every_face_takes_every_option_with_its_default(face):
    parameters = inspect.signature(face).parameters
    assert not [each for each in parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    shown = {name: parameters[name] for name in DECLARED}
    assert {each.kind for each in shown.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert {name: each.default for name, each in shown.items()} == {
        name: option.default_of(face) for name, option in DECLARED.items()
    }
    warns = face is dpfuse.DistributedDataParallel
    assert shown["check_training"].default == ("warn" if warns else "raise"), "the only default that differs"
    assert [name for name, option in DECLARED.items() if option.other_defaults] == ["check_training"]


@pytest.mark.parametrize("face", FACES[:2], ids=lambda face: face.__module__)
def test_the_docstring_has_one_entry_for_each_argument_of_the_signature(face):
    arguments = face.__doc__.partition("\nArgs:\n")[2].partition("\n\n")[0].splitlines()
    entries = [line.partition(":")[0].strip() for line in arguments if line.startswith("    ") and line[4] != " "]
    assert entries == list(inspect.signature(face).parameters)
    said = " ".join(" ".join(arguments).split())
    assert [name for name, option in DECLARED.items() if f"{name}: {option.text}" not in said] == []


@faces
def test_an_unknown_option_is_an_error_that_names_the_nearest_one(face):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'check_finit'; did you mean check_finite$"):
        face(nn.Linear(2, 2), check_finit="raise")
    with pytest.raises(TypeError, match=r"'find_unused_parameter'; did you mean find_unused_parameters$"):
        face(nn.Linear(2, 2), find_unused_parameter=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyz'; expected one of \w+, .*, stall_timeout$"):
        face(nn.Linear(2, 2), xyz=1)


@pytest.mark.parametrize("face", FACES[:2], ids=lambda face: face.__module__)
def test_tools_that_read_types_find_every_option(face):
    hints = get_type_hints(face.__init__)
    assert {name: hints[name] for name in DECLARED} == get_type_hints(CommonOptions)
    assert "options" not in hints


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_every_option_is_compared_among_the_ranks(name):
    other = {"wire_dtype": torch.bfloat16, "plan": "greedy"}.get(name, "other")
    usual, changed = describe_options(options_with()), describe_options(options_with(**{name: other}))
    assert [line for line in changed if line not in usual] == [f"option {name} = {other}"]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"deterministic": 1}, TypeError, "deterministic must be True or False, got 1 of type int"),
        ({"error_feedback": None}, TypeError, "error_feedback must be True or False, got None of type NoneType"),
        (
            {"check": "loose"},
            ValueError,
            "check must be 'deferred' or 'strict', got 'loose'; strict waits",
        ),
        (
            {"check_finite": "of"},
            ValueError,
            "check_finite must be one of 'off', 'warn', 'raise', got 'of'; pass",
        ),
        ({"stall_timeout": "1"}, TypeError, "stall_timeout must be a number of seconds, got '1' of type str; pass"),
        ({"stall_timeout": 0}, ValueError, r"stall_timeout must be > 0 s, got 0; float\('inf'\) waits"),
        (
            {"wire_dtype": (torch.bfloat16, torch.float16)},
            ValueError,
            r"second dtype of wire_dtype must be torch\.float32, in which numbers are added up, got torch\.float16 in",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_an_error_that_names_the_option(given, error, text):
    options_with().check()
    with pytest.raises(error, match=text):
        options_with(**given).check()
