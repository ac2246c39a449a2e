"""The overlap suite measures steps that wait for the network, and holds a prediction for the plan that it uses."""

from __future__ import annotations

import pytest

from bench.bench_overlap import CELLS, PLANNED, QUICK_CELLS, UNSENT, WRAPS, time_cells
from bench.goals import Entry, judge
from bench.step_time import Effort


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_step_that_sends_takes_at_least_what_its_bytes_cost():
    cells = time_cells(QUICK_CELLS, Effort(1, 1, 0), "cpu")
    assert list(cells) == list(QUICK_CELLS)
    entries = []
    for cell, contenders in cells.items():
        assert contenders.keys() == WRAPS.keys()
        latency, _ = CELLS[cell]
        planned = contenders[PLANNED]
        network = planned["latency"] + planned["bytes"] / planned["bandwidth"]
        for name, result in contenders.items():
            assert (result["latency"], result["bytes"]) == (latency, 16 * 768 * 768 * 4)
            if name != UNSENT and not name.startswith("bare"):
                assert min(result["seconds"]) >= network
            entries.append(Entry("overlap", cell, name, result["wall"], 0.0, 0.0, 1, result))
        # The last bucket is sent when backward has ended, whatever is hidden before.
        assert planned["predicted"] >= 0.999 * (latency + 768 * 768 * 4 / planned["bandwidth"])
    assert {outcome.case for outcome in judge(entries)} == {*QUICK_CELLS, "all"}
