"""Which gradients a trace says to be scaled or cut."""

from __future__ import annotations

import torch

from dpfuse.engine.sample import sample_of
from dpfuse.trace.rescaling import Pair, rescaled

VALUES = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))


def test_only_the_places_of_what_was_scaled_or_cut_are_returned():
    changed = {3: VALUES / 3, 4: VALUES, 5: VALUES.clamp(-0.7, 0.7), 6: VALUES + 1, 7: VALUES * (VALUES > 0)}
    pairs = [Pair(place, sample_of(VALUES), sample_of(now)) for place, now in changed.items()]
    assert rescaled(pairs) == [3, 5]
