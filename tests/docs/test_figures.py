"""Figures of the README are those of the records that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.summary import rows, table

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_the_readme_is_made_from_the_records_that_it_names():
    section = (ROOT / "README.md").read_text().partition("## What it costs")[2].partition("\n## ")[0]
    names = re.findall(r"`(bench/results/[\w.-]+\.json)`", section)
    assert len(names) == 2
    records = [json.loads((ROOT / name).read_text()) for name in names]
    assert all(record["machine"]["uncommitted_changes"] is False and not record["quick"] for record in records)
    assert table(rows(records)) in section
