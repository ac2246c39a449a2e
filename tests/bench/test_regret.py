"""The table of bucket rules: the page shows the record, the record is what the command computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import regret
from bench.record_timeline import MODELS, load

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "bucket_rules.md"


@pytest.mark.parametrize("title", ["large models", "small models"])
def test_the_page_shows_the_record(title):
    lines = json.loads(regret.RECORD.read_text())[title]["table"]
    assert len(lines) == 2 + len(regret.RULES)
    assert "\n".join(lines) in PAGE.read_text()


def test_no_rule_is_better_than_the_planner_and_the_ramp_is_good_for_small_models():
    networks = {"one": (2, 100e-6)}
    cells = list(regret.regrets(networks, {"layers_300": regret.on_gpu(load("layers_300")[0])}))
    assert len(cells) == len(regret.RULES) * len(regret.LOADS)
    assert min(cell.regret for cell in cells) >= 1
    worst = {rule: max(cell.regret for cell in cells if cell.rule == rule) for rule in regret.RULES}
    ramp, paddle, *_ = worst.values()
    assert ramp < 1.15 < 1.4 < paddle


@pytest.mark.slow
def test_the_record_is_what_the_command_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(regret, "RECORD", tmp_path / "regret.json")
    before = json.loads((Path(regret.__file__).parent / "results" / "regret.json").read_text())
    regret.main()
    after = json.loads(regret.RECORD.read_text())
    assert {**before, "machine": None} == {**after, "machine": None}


def test_every_model_has_its_timeline():
    for name in MODELS:
        timeline, cost = load(name)
        assert len(timeline.ready) == len(timeline.specs) > 100
        assert cost(1e6) > 0
