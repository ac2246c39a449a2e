"""`dpfuse env`: facts for the report of a bug, without values that may be secret."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpfuse
from dpfuse.commands.command_line import main

ROOT = Path(__file__).parents[2]


def test_it_prints_versions_and_the_machine_and_no_value_of_an_unknown_variable(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_SECRET", "hunter2")
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["dpfuse"], facts["torch"]) == (dpfuse.__version__, torch.__version__)
    assert facts["python"] == platform.python_version()
    assert "gloo" in facts["back ends"]
    assert {"OMP_NUM_THREADS=3", "NCCL_SOCKET_SECRET"} <= {*facts["variables"]}
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in facts)
    assert "hunter2" not in text + json.dumps(facts)
    assert "MY_PASSWORD" not in text
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_kernel_without_triton_says_what_to_install():
    program = """
import sys
sys.modules["triton"] = None
from dpfuse_kernels.flatten import _flatten_kernel as kernel
from dpfuse_kernels.launcher import jit
jit(kernel)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "ModuleNotFoundError: Triton is not installed" in done.stderr
    assert "pip install 'dpfuse[triton]', or set DPFUSE_KERNELS=reference" in done.stderr


@pytest.mark.parametrize("arguments", [["env", "more"], ["env", "--js"]])
def test_a_wrong_command_line_ends_with_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
