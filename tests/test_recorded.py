"""The record of a test run: what it keeps, and that it names no folder of the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import gettempdir

import pytest

from tests.recorded import ROOT, main, record_of


def test_dots_and_folders_are_left_out():
    lines = [
        "collected 2 items",
        "",
        "..F     [100%]",
        "..s.",
        f"{ROOT}/tests/x.py: in {sys.prefix}/lib",
        "1 failed",
        f"at {gettempdir()}/a-1/b.txt'",
    ]
    text = record_of({"torch": "2.13.0"}, "pytest -m not slow", lines)
    assert text.startswith("pytest -m not slow\n")
    assert '"torch": "2.13.0"' in text
    assert text.endswith("collected 2 items\n\n./tests/x.py: in <environment>/lib\n1 failed\nat <temporary>'\n")


@pytest.mark.slow
def test_a_run_is_printed_and_recorded_with_its_exit_code(tmp_path: Path, capfd):
    (tmp_path / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    code = main(str(tmp_path / "record.txt"), [str(tmp_path / "test_two.py"), "-p", "no:cacheprovider", "-q"])
    text = (tmp_path / "record.txt").read_text()
    assert code == 1
    assert "1 failed, 1 passed" in text
    assert "assert 1 == 2" in text
    assert "1 failed, 1 passed" in capfd.readouterr().out
