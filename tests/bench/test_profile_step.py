"""A look at a stack counts for the innermost frame that a label knows, and only inside a step."""

from __future__ import annotations

import pytest

from bench.profile_step import BARE, labelled

STEP = "<module> (bench/profile_step.py:1);_steps (bench/profile_step.py:9)"


@pytest.mark.parametrize(
    ("frames", "label"),
    [
        ("f (dpfuse/engine/reducer.py:2);pack (dpfuse_kernels/host_plan.py:3);copy_ (libtorch.so)", "pack"),
        ("f (dpfuse/comm/waiting.py:2);c10d::Work::wait (libtorch_cpu.so)", "waiting for the other ranks"),
        ("f (dpfuse/engine/delivery.py:2);set (libtorch_python.so)", "delivering gradients"),
        ("f (dpfuse/engine/sync.py:2)", "rest of the engine"),
        ("c10d::Reducer::autograd_hook (libtorch_cpu.so);memcpy (libc.so.6)", "DDP's reducer (C++)"),
        ("hook (bench/sketch.py:52)", "sketch"),
        ("forward (dpfuse/wrapper.py:125);forward (bench/models.py:46);mul (libtorch.so)", BARE),
        ("forward (dpfuse/wrapper.py:125);forward (torch/nn/modules/linear.py:9)", BARE),
        ("forward (dpfuse/wrapper.py:125);_call_impl (torch/nn/modules/module.py:1)", "forward"),
        ("mul (libtorch.so)", BARE),
    ],
)
def test_a_look_counts_for_the_innermost_known_frame(frames: str, label: str) -> None:
    assert labelled(f"{STEP};{frames} 3") == {label: 1.0}


def test_looks_outside_a_step_do_not_count() -> None:
    assert labelled(
        f"<module> (bench/profile_step.py:1);f (dpfuse/engine/sync.py:2) 7\n{STEP};mul (libtorch.so) 1"
    ) == {BARE: 1.0}
    assert labelled("") == {}
