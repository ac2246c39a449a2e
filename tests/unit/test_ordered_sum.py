"""What a rank does that cannot add up its part of an ordered sum, while its peers wait for that part."""

from __future__ import annotations

import pytest
import torch

from dpfuse.engine.exchanges.ordered import OrderedParts, OrderedSum


class Failing(OrderedParts):
    """Raises in the first calls, as where memory is short."""

    def __init__(self, times):
        super().__init__(1)
        object.__setattr__(self, "times", [times])

    def add_up(self, parts, out, residual):
        self.times[0] -= 1
        if self.times[0] >= 0:
            raise RuntimeError("planted")
        super().add_up(parts, out, residual)


def test_a_lack_that_passes_costs_nothing(group):
    flat = torch.arange(8.0)
    OrderedSum(group, Failing(1)).start(flat).wait()
    assert flat.tolist() == list(range(8))


def test_another_one_is_an_error_and_the_peers_get_no_numbers(group):
    flat = torch.arange(8.0)
    work = OrderedSum(group, Failing(2)).start(flat)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            work.wait()
    assert flat.isnan().all()
