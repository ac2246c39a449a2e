"""Programs: what cannot be built says why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfuse import DPFuseError
from dpfuse.paddle import static
from tests.paddle.programs import sgd


def wrong_in_a_guard(kind):
    program, other = static.Program(), static.Program()
    with static.program_guard(other):
        foreign = static.data("foreign", [2])
    with static.program_guard(program):
        x = static.data("x", [None, 2])
        y = x * 2
        match kind:
            case "if":
                if x.sum() > 0:
                    pass
            case "loop":
                for _ in x:
                    pass
            case "backward":
                y.backward()
            case "foreign variable":
                x + foreign
            case "foreign in a list":
                torch.nn.Identity()([x, foreign])
            case "not a leaf":
                x * torch.ones(2, requires_grad=True)
            case "name taken":
                y.name = "x"
            case "name of a gradient":
                y.name = "x@GRAD"
            case "name of a number":
                y.name = 7
            case "feed renamed":
                x.name = "z"
            case "feed taken":
                static.data("x", [1])
            case "feed of a gradient":
                static.data("x@GRAD", [1])
            case "feed without name":
                static.data(7, [1])
            case "feed without shape":
                static.data("z", 7)
            case "feed of negative shape":
                static.data("z", [-2])
            case "feed without dtype":
                static.data("z", [1], "float")
            case "feed of unknown dtype":
                static.data("z", [1], "float31")
            case "loss unknown":
                program.minimize("mull", sgd)
            case "loss of a feed":
                program.minimize(x, sgd)
            case "loss of another type":
                program.minimize(7, sgd)
            case "optimizer made already":
                program.minimize(y, sgd([nn.Parameter(torch.ones(1))]))
            case "no optimizer":
                program.minimize(y, "sgd")
            case "two losses":
                program.minimize(y, sgd)
                program.minimize(y, sgd)
            case "test program":
                program.clone(for_test=True).minimize("mul", sgd)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("if", DPFuseError, "'gt' controls a branch or loop.*torch.where"),
        ("loop", DPFuseError, "'x' controls a branch or loop.*loop"),
        ("backward", DPFuseError, r"backward\(\) of variable 'mul'.*minimize"),
        ("foreign variable", RuntimeError, "another program"),
        ("foreign in a list", DPFuseError, "'foreign' belongs to another program"),
        ("not a leaf", DPFuseError, r"shape \(2,\) with requires_grad=True.*nn.Parameter"),
        ("name taken", ValueError, "'x' cannot name this variable"),
        ("name of a gradient", ValueError, "'x@GRAD' cannot name this variable"),
        ("name of a number", TypeError, "must be a string, got 7"),
        ("feed renamed", ValueError, "feed 'x' cannot be renamed to 'z'"),
        ("feed taken", ValueError, "'x' cannot name a feed"),
        ("feed of a gradient", ValueError, "'x@GRAD' cannot name a feed"),
        ("feed without name", TypeError, "name must be a string, got 7"),
        ("feed without shape", TypeError, "shape of 'z' must be a list or tuple of sizes, got 7"),
        ("feed of negative shape", ValueError, r"shape\[0\] of 'z': got -2"),
        ("feed of unknown dtype", ValueError, "dtype of 'z': got 'float31'"),
        ("loss unknown", ValueError, "loss 'mull' is no variable.*Did you mean 'mul'"),
        ("loss of a feed", ValueError, "loss 'x' is not computed by the program"),
        ("loss of another type", TypeError, "loss must be a variable or its name, got 7"),
        ("optimizer made already", TypeError, "optimizer must be a function.*got SGD"),
        ("no optimizer", TypeError, "optimizer must be a function.*got str"),
        ("two losses", DPFuseError, "already minimises 'mul'"),
        ("test program", DPFuseError, "cloned for test"),
    ],
)
def test_what_cannot_be_built_says_why(kind, error, text):
    with pytest.raises(error, match=text):
        wrong_in_a_guard(kind)


def test_float_is_a_dtype():
    wrong_in_a_guard("feed without dtype")


def test_outside_of_a_guard_nothing_is_recorded():
    with static.program_guard(static.Program()):
        x = static.data("x", [2])
    with pytest.raises(DPFuseError, match="outside `with program_guard"):
        x * 2
    with pytest.raises(DPFuseError, match=r"data\('x'\) outside of program_guard"):
        static.data("x", [2])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((nn.Linear(1, 1),), "main_program.*Linear"), ((static.Program(), 7), "startup_program.*int")],
)
def test_a_guard_takes_programs(arguments, text):
    with pytest.raises(TypeError, match=text), static.program_guard(*arguments):
        pass
