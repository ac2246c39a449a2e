"""The hooks of a trace stand around those of a program: with torch's own order of calls, whatever came first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfuse.engine import torch_private
from dpfuse.trace.program_hooks import HooksAround


class Program:
    """One parameter, hooks of a program on it, and a trace; `calls` has what each of them was given."""

    def __init__(self):
        self.module = nn.Linear(1, 1, bias=False)
        self.param = self.module.weight
        self.calls = []
        self.handles = []

    def add_hooks(self, name, factor):
        """Put one hook of each kind on the parameter, which multiply by this factor."""

        def with_gradient(grad):
            self.calls.append(name)
            return grad * factor

        def accumulated(param):
            self.calls.append(f"{name}, accumulated")
            param.grad *= factor

        self.handles += [
            self.param.register_hook(with_gradient),
            self.param.register_post_accumulate_grad_hook(accumulated),
        ]

    def trace(self):
        """Return the hooks of a trace, which note numbers."""
        return HooksAround(
            self.param,
            lambda grad: self.calls.append(f"computed {grad.item():g}"),
            lambda grad: self.calls.append(f"hooked {grad.item():g}"),
            lambda param: self.calls.append(f"accumulated {param.grad.item():g}"),
        )

    def backward(self):
        """Return what a backward calls, whose gradient is 1."""
        self.calls.clear()
        self.param.grad = None
        self.module(torch.ones(1, 1, dtype=self.param.dtype)).sum().backward()
        return self.calls


ALL = [
    "computed 1",
    *("before", "behind"),
    "hooked 6",
    "accumulated 6",
    *("before, accumulated", "behind, accumulated"),
    "accumulated 36",
]


def traced_program():
    """A program with a hook of each kind from before a trace, and from behind its begin."""
    program = Program()
    program.add_hooks("before", 2)
    around = program.trace()
    program.add_hooks("behind", 3)
    return program, around


def test_a_trace_sees_a_gradient_before_and_behind_hooks_that_came_before_and_after_it():
    program, around = traced_program()
    for _ in range(2):
        around.surround()
        assert program.backward() == ALL
    program.add_hooks("last", 1)
    around.surround()
    assert [call for call in program.backward() if "last" not in call] == ALL
    assert program.calls.index("last") < program.calls.index("hooked 6")
    assert program.calls[-2:] == ["last, accumulated", "accumulated 36"]


def test_without_hooks_of_the_program_a_trace_has_one():
    program, around = traced_program()
    around.surround()
    for handle in program.handles:
        handle.remove()
    around.surround()
    assert program.backward() == ["computed 1"]
    assert not program.param._post_accumulate_grad_hooks
    around.remove()
    assert program.backward() == []


def test_a_trace_that_leaves_changes_nothing_about_the_hooks_of_the_program():
    program, around = traced_program()
    around.surround()
    around.leave()
    assert program.backward() == ["computed 1", "before", "behind", "before, accumulated", "behind, accumulated"]
    assert program.param.grad.item() == 36


def test_a_frozen_parameter_gets_no_more_hooks():
    program, around = traced_program()
    program.param.requires_grad_(False)
    around.surround()
    program.param.requires_grad_(True)
    assert "hooked 6" not in program.backward()


def test_two_traces_of_a_shared_parameter_see_the_same():
    program = Program()
    program.add_hooks("before", 2)
    both = [program.trace(), program.trace()]
    program.add_hooks("behind", 3)
    for _ in range(2):
        for around in both:
            around.surround()
        calls = [call for call in program.backward() if call[0] in "cha"]
        assert calls == [each for call in ALL if call[0] in "cha" for each in (call, call)]


def test_hooks_survive_a_conversion_that_changes_the_data():
    program, around = traced_program()
    around.surround()
    program.backward()
    program.module.double()
    assert program.backward() == ALL
    around.surround()
    assert program.backward() == ALL
    assert program.param.grad.dtype == torch.float64


@pytest.fixture
def conversions_swap():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("conversions_swap")
@pytest.mark.parametrize("way", ["conversion", "swap_tensors"])
def test_a_parameter_can_be_swapped_and_then_torch_calls_no_hook_of_it(way):
    """No node of the graph is kept, which would make torch refuse it."""
    program, around = traced_program()
    around.surround()
    program.backward()
    program.param.grad = None
    assert program.param._use_count() == 1
    if way == "conversion":
        program.module.double()
    else:
        torch.utils.swap_tensors(program.param, nn.Parameter(torch.ones(1, 1)))
    for _ in range(2):  # those of the program are called neither
        assert program.backward() == []
        assert program.param.grad.item() == 1
        around.surround()


def test_where_torch_shows_no_table_a_trace_keeps_its_place(monkeypatch):
    program, around = traced_program()
    monkeypatch.setattr(torch_private, "HOOK_TABLES", ("_no_such", "_nor_such"))
    around.surround()
    assert program.backward() == ["before", "computed 2", "behind", "before, accumulated", "behind, accumulated"]
