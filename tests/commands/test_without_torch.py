"""Importing torch takes seconds: commands that need none import none, and the doctor imports it after its runs."""

from __future__ import annotations

import re

import pytest

from tests.distributed.processes import run


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["--help"], 0),
        (["--version"], 0),
        (["doctor", "--help"], 0),
        (["doctor", "--nproc", "2", "train.py"], 2),
        (["plan", "module:factory", "--comm_buffer_size", "-1"], 2),
        (["run", "ends.py"], 0),
        (["run", "missing.py"], 1),
        (["doctor", "missing.py"], 1),
        (["diff", "missing", "missing"], 2),
    ],
    ids=str,
)
def test_a_command_that_needs_no_torch_imports_none(words, code, tmp_path):
    (tmp_path / "ends.py").write_text("")
    done = run("-X", "importtime", "-m", "dpfuse", *words, folder=tmp_path, warm=False)
    imported = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert done.returncode == code, done.stderr
    assert "dpfuse.commands.command_line" in imported
    assert "torch" not in imported


LOOKS = """
import os, sys
with open(f"/proc/{os.getppid()}/maps") as maps:
    sys.exit(f"torch in the doctor's process: {'libtorch' in maps.read()}")
"""


@pytest.mark.slow
def test_the_doctor_has_no_torch_beside_its_runs(tmp_path):
    (tmp_path / "looks.py").write_text(LOOKS)
    done = run("-m", "dpfuse", "doctor", "--ranks", 1, "--own_ranks", "looks.py", folder=tmp_path, warm=False)
    assert "torch in the doctor's process: False" in re.sub(r"\s+", " ", done.stdout), done.stderr
    assert (tmp_path / "dpfuse-doctor" / "report.json").exists()
