"""The README's table: ratios of one run, each from the contenders that it names."""

from __future__ import annotations

from typing import Any

import pytest

from bench.summary import rows


def record(*cases: tuple[str, str, dict[str, float]]) -> dict[str, Any]:
    return {
        "measurements": [
            {"suite": suite, "case": case, "variant": name, "median": seconds}
            for suite, case, contenders in cases
            for name, seconds in contenders.items()
        ]
    }


def step(ours: float, view: float = 4.0) -> dict[str, float]:
    others = {"DDP default": 5.0, "DDP view": view, "FSDP2 replicate": 9.0, "sketch": 1.0, "Horovod's rule": 1.0}
    return {"bare": 0.5, "dpfuse views": 1.0, "dpfuse private": ours, **others}


RUNS = [
    record(("step", "pair CNN", step(3.0)), ("overlap", "20 us", step(2.0)), ("overlap", "500 us", step(4.0))),
    record(("step", "pair CNN", step(3.5)), ("overlap", "20 us", step(2.0)), ("overlap", "500 us", step(4.0, 2.0))),
]


def test_a_cell_has_the_least_and_the_largest_ratio_of_the_runs():
    networks, cnn = rows(RUNS)
    assert networks.over_default == pytest.approx([0.6, 0.6])
    assert networks.over_best == pytest.approx([0.75, 1.25])
    assert cnn.over_default == pytest.approx([0.6, 0.7])
    assert cnn.over_best == pytest.approx([0.75, 0.875])
    assert cnn.relative == pytest.approx({"dpfuse": 0.65, "the fastest mode of DDP": 0.8, "FSDP2 replicate": 1.8})


def test_a_row_that_a_record_lacks_is_left_out():
    assert [row.text for row in rows([RUNS[0], record(("step", "pair CNN", step(3.0)))])] == [
        "two ranks, a CNN of 4 MB"
    ]
