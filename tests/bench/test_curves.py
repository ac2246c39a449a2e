"""Training curves: what is trained learns, and what is worse than its noise is told."""

from __future__ import annotations

import json

import pytest

from bench import curves


def test_a_format_that_is_worse_than_the_noise_is_told():
    base = [{"loss": 1.0}, {"loss": 1.1}, {"loss": 1.2}]
    rows = curves.compare({
        "float32": base,
        "good": [{"loss": 1.1}, {"loss": 1.2}, {"loss": 1.2}],
        "better": [{"loss": 0.1}, {"loss": 0.1}, {"loss": 0.1}],
        "bad": [{"loss": 1.3}, {"loss": 1.4}, {"loss": 1.5}],
    })  # fmt: skip
    assert [row["within_noise"] for row in rows] == [True, True, True, False]
    assert rows[0]["noise"] == pytest.approx(0.1)
    assert rows[3]["difference"] == pytest.approx(0.3)


@pytest.mark.slow
def test_a_quick_run_leaves_a_record_and_a_picture(tmp_path):
    curves.main(["--quick", "--results", str(tmp_path), "--picture", str(tmp_path / "curves.png")])
    (path,) = tmp_path.glob("curves-*-quick.json")
    record = json.loads(path.read_text())
    assert {row["format"] for row in record["ratios"]} == set(curves.FORMATS)
    assert len(record["measurements"]) == 2 * 2 * len(curves.FORMATS)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
