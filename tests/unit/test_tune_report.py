"""Simulated schedules and what is made of them: tables, JSON, a picture, a trace."""

from __future__ import annotations

import builtins
import json
import math

import pytest

import dpfuse
from dpfuse.tune import CostTable, Timeline, plan_from_groups, save_plot, save_trace, simulate
from dpfuse.tune.trace import trace_events

SPECS = [dpfuse.ParamSpec(name, (250,), "float32") for name in ("first", "second", "third", "fourth")]
TIMELINE = Timeline(SPECS, [4.0, 2.5, 2.0, 1.0], 4.5)
COST = CostTable.affine(0.5, 1000.0)  # a gradient of 1000 bytes takes one second
PLAN = plan_from_groups(SPECS, [[3], [2, 1], [0]])
SCHEDULE = simulate(TIMELINE, PLAN, COST)


def test_a_schedule_by_hand():
    alone, pair, last = SCHEDULE.buckets
    assert (alone.opened, alone.ready, alone.sent, alone.landed, alone.exposed) == (1.0, 1.0, 1.0, 2.5, 0.0)
    assert (alone.params, alone.nbytes, alone.closed_by, alone.late) == (1, 1000, "fourth", 0.0)
    # Ready and sent together; it lands half a second after backward's end at 4.5.
    assert (pair.opened, pair.ready, pair.sent, pair.landed, pair.exposed) == (2.0, 2.5, 2.5, 5.0, 0.5)
    assert (pair.closed_by, pair.late) == ("second", 0.5)
    # Ready at 4, held until the end of backward at 4.5, then waits for the link.
    assert (last.ready, last.sent, last.landed, last.exposed) == (4.0, 5.0, 6.5, 1.5)
    assert (SCHEDULE.end, SCHEDULE.exposed) == (6.5, 2.0)
    assert sum(bucket.exposed for bucket in SCHEDULE.buckets) == SCHEDULE.exposed


def test_the_last_bucket_is_sent_when_backward_has_ended():
    schedule = simulate(TIMELINE, plan_from_groups(SPECS, [[3, 2, 1, 0]]), CostTable.affine(0.0, 1e9))
    assert schedule.buckets[0].ready == 4.0
    assert schedule.buckets[0].sent == 4.5


def test_buckets_are_sent_in_the_order_of_the_plan():
    schedule = simulate(TIMELINE, plan_from_groups(SPECS, [[0], [1], [2], [3]]), COST)
    assert [bucket.sent for bucket in schedule.buckets] == [4.0, 5.5, 7.0, 8.5]


def test_a_plan_of_other_parameters_is_refused():
    for specs in (SPECS[:3], [*SPECS[:3], dpfuse.ParamSpec("other", (250,), "float32")]):
        with pytest.raises(ValueError, match="expected the parameters of one model"):
            simulate(TIMELINE, dpfuse.plan_buckets(specs), COST)


def test_the_table_says_what_the_schedule_says():
    lines = SCHEDULE.explain().splitlines()
    assert [line.split() for line in lines[:-1]] == [
        ["order", "MB", "params", "ready", "sent", "landed", "exposed", "waited", "late", "closed", "by"],
        ["0", "0.0009537", "1", "1000.000", "1000.000", "2500.000", "0.000", "0.000", "0.000", "fourth"],
        ["1", "0.001907", "2", "2500.000", "2500.000", "5000.000", "500.000", "0.000", "500.000", "second"],
        ["2", "0.0009537", "1", "4000.000", "5000.000", "6500.000", "1500.000", "1000.000", "0.000", "first"],
    ]
    assert lines[-1] == "backward ends at 4500.000 ms, the last bucket lands at 6500.000 ms: 2000.000 ms exposed"


def test_json_holds_everything():
    data = json.loads(json.dumps(SCHEDULE.to_json()))
    assert (data["backward_end"], data["end"], data["exposed"]) == (4.5, 6.5, 2.0)
    assert data["buckets"][1] == {
        "order": 1,
        "params": 2,
        "nbytes": 2000,
        "opened": 2.0,
        "ready": 2.5,
        "closed_by": "second",
        "late": 0.5,
        "sent": 2.5,
        "landed": 5.0,
        "exposed": 0.5,
    }


def test_a_trace_has_a_span_for_each_phase_of_each_bucket(tmp_path):
    save_trace(SCHEDULE, tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["traceEvents"] == trace_events(SCHEDULE)
    rows = {event["tid"]: event["args"]["name"] for event in data["traceEvents"] if event["ph"] == "M"}
    spans = [
        (rows[event["tid"]], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in data["traceEvents"]
        if event["ph"] == "X"
    ]
    assert spans == [
        ("backward", 0.0, 4.5),
        ("backward", 4.5, 6.5),
        ("all-reduces", 1.0, 2.5),
        ("all-reduces", 2.5, 5.0),
        ("buckets ready, not sent", 4.0, 5.0),
        ("all-reduces", 5.0, 6.5),
    ]
    ready = [(event["name"], event["ts"]) for event in data["traceEvents"] if event["ph"] == "i"]
    assert ready == [
        ("bucket 0 ready: fourth", 1e6),
        ("bucket 1 ready: second", 2.5e6),
        ("bucket 2 ready: first", 4e6),
    ]
    facts = [event["args"] for event in data["traceEvents"] if event["ph"] == "X" and "args" in event]
    assert [fact["exposed ms"] for fact in facts] == [0.0, 500.0, 1500.0]
    assert all(math.isfinite(event.get("ts", 0.0)) for event in data["traceEvents"])


def bars(schedule, monkeypatch, tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig

    def keep(self, *args, **options):
        drawn.append(self)
        return save(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    save_plot(schedule, tmp_path / "plan.png", title="by hand")
    return drawn[0].axes[0]


def test_a_plot_draws_what_the_schedule_says(monkeypatch, tmp_path):
    axis = bars(SCHEDULE, monkeypatch, tmp_path)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    spans = [(bar.get_x() / 1e3, (bar.get_x() + bar.get_width()) / 1e3) for bar in axis.patches if bar.get_width()]
    assert [tuple(round(time, 9) for time in span) for span in spans] == [
        (1.0, 2.5),  # the first bucket's all-reduce
        (2.0, 2.5), (2.5, 4.5), (4.5, 5.0),  # filling, all-reduce, exposed
        (4.0, 5.0), (5.0, 6.5),  # ready but not sent, exposed
    ]  # fmt: skip
    assert axis.get_title() == "by hand: 2000.000 ms exposed"
    assert [text.get_text() for text in axis.texts][1] == "0.00191 MB, closed by second"


def test_a_plot_of_two_buckets_labels_whole_rows_and_its_legend_covers_no_bar(monkeypatch, tmp_path):
    specs = [dpfuse.ParamSpec(str(index), (10,), "float32") for index in range(2)]
    schedule = simulate(Timeline.synthetic(specs, 1.0), dpfuse.plan_buckets(specs, 0, 0), COST)
    axis = bars(schedule, monkeypatch, tmp_path)
    assert all(row.is_integer() for row in axis.get_yticks())
    legends = [*axis.figure.legends, *filter(None, [axis.get_legend()])]
    assert len(legends) == 1
    assert not legends[0].get_window_extent().overlaps(axis.get_window_extent())


def test_a_plot_of_many_buckets_has_no_names(monkeypatch, tmp_path):
    specs = [dpfuse.ParamSpec(str(index), (10,), "float32") for index in range(60)]
    timeline = Timeline.synthetic(specs, 1.0)
    schedule = simulate(timeline, dpfuse.plan_buckets(specs, 0, 0), COST)
    assert not bars(schedule, monkeypatch, tmp_path).texts


def test_without_matplotlib_the_plot_says_what_to_do(monkeypatch, tmp_path):
    real = builtins.__import__

    def refuse(name, *args):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"needs matplotlib, .* pip install 'dpfuse\[bench\]', or use save_trace"):
        save_plot(SCHEDULE, tmp_path / "plan.png")
