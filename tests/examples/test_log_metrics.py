"""The example that logs metrics: what it prints, and what TensorBoard and Weights & Biases then have."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.log_metrics import Averaged, main
from tests.distributed.processes import launch
from tests.patience import patience

EXAMPLE = Path(__file__).parents[2] / "examples/log_metrics.py"


@pytest.mark.slow
def test_numbers_are_printed_on_one_rank():
    done = launch("--nproc_per_node=2", str(EXAMPLE), "--steps=11")
    assert done.returncode == 0, done.stderr
    number = r"[\d.e+-]+|inf"
    lines = [
        f"step {step}: exposed_seconds ({number}), grad_norm ({number}), noise_scale ({number})" for step in (1, 6, 11)
    ]
    assert re.fullmatch("\n".join(lines) + "\n", done.stdout)


def test_without_ranks_it_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["log_metrics.py"])
    with pytest.raises(SystemExit):
        main()
    assert "python -m dpfuse.launch --nproc_per_node 2" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "pattern"), [("tensorboard", "events.out.tfevents.*"), ("wandb", "**/*.wandb")])
def test_each_log_is_written(tmp_path, package, pattern):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-m", "dpfuse.launch", "--nproc_per_node=2", str(EXAMPLE), "--to", package]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob(pattern)
    assert b"dpfuse/grad_norm" in written.read_bytes()


def test_the_average_is_the_quotient_of_two_averages():
    noise = Averaged(keep=0.5)
    assert noise.add({"gradient_square": 2.0, "gradient_variance": 8.0}) == 4.0
    assert noise.add({"gradient_square": 4.0, "gradient_variance": 2.0}) == (0.5 * 4 + 0.5 * 2) / (0.5 * 1 + 0.5 * 4)
    assert Averaged().add({"gradient_square": -1.0, "gradient_variance": 2.0}) == float("inf")
