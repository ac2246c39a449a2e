"""While a CUDA graph is captured, no host may wait: what the ranks have told each other before is read afterwards."""

from __future__ import annotations

import pytest

from dpfuse.engine.report_layout import ReportPlace
from dpfuse.loop.compared_words import ComparedWords


class Copy:
    """Numbers on their way from a device. Reading them waits, which ends a capture."""

    def __init__(self):
        self.in_capture = False

    def read(self):
        if self.in_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        return [2.0]


@pytest.mark.parametrize("backwards", [1, 3])
def test_words_that_are_on_their_way_are_read_by_the_first_backward_after_the_capture(backwards, monkeypatch):
    place = ReportPlace("loop", 1, compared=False, parts={"there": slice(0, 1)})
    copy, words = Copy(), ComparedWords(place, 2)
    words._copy = copy, [1.0]
    monkeypatch.setattr("dpfuse.loop.compared_words.capturing", lambda: copy.in_capture)
    copy.in_capture = True
    assert [words.delivered() for _ in range(backwards)] == [None] * backwards
    copy.in_capture = False
    sums = words.delivered()
    assert sums is not None
    assert sums.all_set("there")
    assert words.delivered() is None
