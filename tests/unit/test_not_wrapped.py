"""A bare model where a wrapped one belongs: the error says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse


def timed(model):
    with dpfuse.time_communication(model):
        pass


@pytest.mark.parametrize(("call", "name"), [(timed, "time_communication"), (dpfuse.autotune, "autotune")])
def test_a_model_that_is_not_wrapped_is_refused(call, name):
    with pytest.raises(TypeError, match=rf"{name}: .* got Linear\. .*dpfuse\.DistributedDataParallel\(module\)"):
        call(nn.Linear(2, 1))


def test_a_compiled_wrapper_is_told_apart():
    compiled = torch.compile(nn.Linear(2, 1), backend="eager")
    with pytest.raises(TypeError, match=r"got OptimizedModule, whose `_orig_mod` may be one\. Pass the result"):
        timed(compiled)


def scaled(model):
    dpfuse.GradScaler(model=model)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("call", [timed, scaled, dpfuse.autotune])
def test_a_replicated_module_is_told_of_its_wrapper(call):
    model = dpfuse.replicate(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"got ReplicatedLinear\. Pass its replicated_by"):
        call(model)
