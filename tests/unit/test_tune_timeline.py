"""Timelines: what was recorded, condensed, checked, written and read."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dpfuse
from dpfuse.tune import Timeline

SPECS = [dpfuse.ParamSpec(name, (size,), "float32") for name, size in [("a", 4), ("b", 6), ("c", 2)]]


def test_steps_are_averaged_over_ranks_and_typical_of_steps():
    ready = np.zeros((3, 2, 3))
    ready[:, :, 0] = [[1, 3], [100, 100], [4, 4]]
    ready[:, :, 1] = [[0, 1], [1, 1], [1, 0]]
    ready[:, :, 2] = [[math.nan, 5], [7, 7], [6, 6]]  # no gradient on rank 0 in the first step
    ends = np.array([[8.0, 8.0], [100.0, 100.0], [8.0, 10.0]])
    timeline = Timeline.from_steps(SPECS, ready, ends)
    assert timeline.ready == (4.0, 0.5, 6.5)
    assert timeline.backward_end == 9.0
    assert timeline.order == (1, 0, 2)


def test_a_parameter_that_never_got_a_gradient_is_ready_at_the_end():
    ready = np.full((2, 3, 3), math.nan)
    ready[:, :, 0] = 1.0
    timeline = Timeline.from_steps(SPECS, ready, np.full((2, 3), 5.0))
    assert timeline.ready == (1.0, 5.0, 5.0)
    # Of those ready together, the last registered comes first, as gradients do.
    assert timeline.order == (0, 2, 1)


def test_rounding_never_puts_a_gradient_behind_the_end():
    rng = np.random.default_rng(0)
    for _ in range(200):
        ends = rng.random((4, 100))
        Timeline.from_steps(SPECS, np.repeat(ends[:, :, None], 3, axis=2), ends)


def test_shapes_that_do_not_fit_are_refused():
    for ready, ends in [
        (np.zeros((2, 3)), np.zeros((2, 3))),
        (np.zeros((2, 2, 3)), np.zeros((2, 3))),
        (np.zeros((0, 2, 3)), np.zeros((0, 2))),
    ]:
        with pytest.raises(ValueError, match=r"expected \(steps, ranks, parameters\)"):
            Timeline.from_steps(SPECS, ready, ends)
    with pytest.raises(ValueError, match="2 ready times for 3 parameters"):
        Timeline.from_steps(SPECS, np.zeros((1, 1, 2)), np.zeros((1, 1)))


@pytest.mark.parametrize(
    ("ready", "end", "message"),
    [
        ([0.0, 0.0, 2.0], 1.0, "'c' was ready after 2.0 s; expected a time between 0 and the end"),
        ([0.0, -1.0, 0.0], 1.0, "'b' was ready after -1.0 s"),
        ([math.nan, 0.0, 0.0], 1.0, "'a' was ready after nan s"),
        ([0.0, 0.0, 0.0], math.inf, "backward_end must be seconds >= 0, got inf"),
        ([0.0, 0.0, 0.0], math.nan, "backward_end must be seconds >= 0, got nan"),
        ([0.0, 0.0], 1.0, "2 ready times for 3 parameters"),
    ],
)
def test_times_that_cannot_be_are_refused(ready, end, message):
    with pytest.raises(ValueError, match=message):
        Timeline(SPECS, ready, end)


def test_a_timeline_needs_parameters_and_a_known_wire():
    with pytest.raises(ValueError, match="at least one parameter"):
        Timeline([], [], 1.0)
    with pytest.raises(ValueError, match=r"wire_dtype must be None or one of .*, got 'float31'"):
        Timeline(SPECS, [0.0] * 3, 1.0, "float31")


def test_synthetic_gradients_come_backwards_paced_by_work():
    assert Timeline.synthetic(SPECS, 1.2).ready == pytest.approx((1.2, 0.8, 0.2))
    timeline = Timeline.synthetic(SPECS, 1.0, work=[0.0, 1.0, 3.0], wire_dtype="bfloat16")
    assert timeline.ready == pytest.approx((1.0, 1.0, 0.75))
    assert timeline.order == (2, 1, 0)
    assert timeline.nbytes == (8, 12, 4)
    for work in ([1.0], [0.0, 0.0, 0.0], [1.0, -1.0, 1.0], [1.0, math.inf, 1.0]):
        with pytest.raises(ValueError, match="work must be one amount >= 0 for each of 3 parameters"):
            Timeline.synthetic(SPECS, 1.0, work=work)
