"""Predictions of published tables: the record is what is computed, the page shows it, models have their sizes."""

from __future__ import annotations

import json
from functools import cache

import pytest

from bench import published_scaling
from bench.published_models import MODELS, parameters, timeline_of
from bench.published_tables import SERIES, SOURCES, Series
from dpfuse.tune import Cluster, Connection

NOTHING = Connection("nothing", 1e18, 0.0, "by hand")


computed = cache(published_scaling.compute)  # takes some 20 s


@pytest.mark.slow
@pytest.mark.slow
def test_the_record_is_what_the_command_computes():
    found = json.loads(published_scaling.RECORD.read_text())
    assert set(found) == {"machine", *computed()}
    assert {**found, "machine": None} == json.loads(json.dumps({**computed(), "machine": None}))


@pytest.mark.slow
@pytest.mark.slow
def test_the_page_shows_the_record():
    page = published_scaling.PAGE.read_text(encoding="utf-8")
    assert published_scaling.fill(page, computed()["tables"]) == page


@pytest.mark.slow
def test_the_command_writes_both(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(published_scaling, "compute", computed)
    record, page = tmp_path / "record.json", tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in computed()["tables"]))
    published_scaling.main(record, page)
    assert json.loads(record.read_text())["rows"] == computed()["rows"]
    assert "| torch DDP | 16 |" in page.read_text()
    assert "record: record.json" in capsys.readouterr().out


def test_a_page_without_a_marker_is_an_error():
    with pytest.raises(ValueError, match="no <!-- summary -->"):
        published_scaling.fill("# A page\n", {"summary": ["line"]})


@pytest.mark.slow
def test_many_tables_with_sources_are_predicted():
    assert {series.table for series in SERIES} == set(SOURCES)
    assert len(SOURCES) >= 4
    rows = computed()["rows"]
    assert len(rows) == sum(len(series.rows) - 1 for series in SERIES)
    assert all(row["error"] == pytest.approx(row["predicted"] / row["published"] - 1, abs=1e-3) for row in rows)


@pytest.mark.slow
def test_every_error_of_the_summary_is_the_mean_of_its_rows():
    rows = [row for row in computed()["rows"] if row["table"] == "torch DDP"]
    errors = [row["error"] for row in rows]
    line = next(line for line in computed()["tables"]["summary"] if line.startswith("| torch DDP |"))
    assert f"| {sum(map(abs, errors)) / len(errors):.1%} |" in line


def test_a_network_without_cost_scales_perfectly():
    free = Cluster(NOTHING, NOTHING)
    for base in (1, 8):
        series = Series("table", "free", "resnet50", 32, ((base, 100.0 * base), (64, 6400.0)), free, "torch DDP")
        (row,) = published_scaling.predict(series)
        assert row.predicted == pytest.approx(6400, rel=1e-6)


def test_a_base_of_several_ranks_is_predicted_as_itself():
    slow = Cluster(NOTHING, Connection("slow", 5e9, 20e-6, "by hand"), ranks_per_node=4)
    series = Series("table", "slow", "resnet50", 32, ((8, 800.0), (8, 800.0)), slow, "torch DDP")
    (row,) = published_scaling.predict(series)
    assert row.predicted == pytest.approx(800, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet50", 25_557_032), ("resnet101", 44_549_160), ("resnet152", 60_192_808), ("vgg16", 138_357_544),
        ("resnext50_32x4d", 25_028_904), ("resnext101_32x8d", 88_791_336), ("inception_v3", 23_834_568),
        ("bert_base", 109_482_240), ("bert_large", 335_141_888), ("alexnet", 61_838_248),
    ],
)  # fmt: skip
def test_a_model_has_its_published_number_of_parameters(name, count):
    assert name in MODELS
    assert parameters(name) == count
    assert timeline_of(name).backward_end > 0


def test_the_first_layer_of_an_estimated_backward_is_ready_last():
    timeline = timeline_of("vgg16")
    assert timeline.ready[0] == timeline.backward_end
    assert timeline.ready[-1] < 0.01 * timeline.backward_end
