"""Fixtures of the tests that need one process."""

from __future__ import annotations

import pytest

from tests.streams import PretendedStreams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> PretendedStreams:
    """CUDA streams that pretend."""
    pretended = PretendedStreams()
    pretended.install(monkeypatch)
    return pretended
