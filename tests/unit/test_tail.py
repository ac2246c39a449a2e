"""What a tail tells where nothing can be read from the device."""

from __future__ import annotations

import pytest
import torch

from dpfuse.tail import ALL_WELL, Report, Tail


@pytest.mark.parametrize("wait", [True, False])
def test_while_a_graph_is_captured_only_this_ranks_own_failure_is_known(wait, monkeypatch):
    tail = Tail(1, 3, 2, 0.5)
    tail.landed(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]))
    assert not tail.deaf
    assert tail.report(wait=wait) == Report([0], [])
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    monkeypatch.setattr("dpfuse.tail._read", None)  # calling it would wait for the device
    assert tail.deaf
    assert tail.report(wait=wait) == ALL_WELL
    assert tail.report(wait=wait, failed=True) == Report((1,), ())
