"""What is recorded of a backward is read again as it was."""

from __future__ import annotations

import json

import dpfuse
from bench import record_timeline
from dpfuse.tune import CostTable, Timeline


def test_a_record_is_read_as_it_was(tmp_path, monkeypatch):
    specs = (
        dpfuse.ParamSpec("first", (2, 3), "float32", "cuda:1"),
        dpfuse.ParamSpec("second", (), "bfloat16", sparse=True),
    )
    timeline, cost = Timeline(specs, (0.1 + 0.2, 0.0), 1 / 3, "float16"), CostTable((1, 2.5), (0.1 + 0.2, 4))
    monkeypatch.setattr(record_timeline, "FOLDER", tmp_path)
    (tmp_path / "small-cpu2.json").write_text(json.dumps(record_timeline._as_json(timeline, cost)))
    assert record_timeline.load("small") == (timeline, cost)
