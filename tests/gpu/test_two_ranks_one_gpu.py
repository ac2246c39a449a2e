"""Two real NCCL ranks on one GPU, as NCCL can from 2.30 on: its path with something to add, without a second card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
LEAST = (2, 30)
SECONDS = 60
KINDS = [
    "views",
    "private",
    "torch's face",
    "in place",
    "deterministic",
    "bfloat16",
    "bfloat16 in float32",
    "eight bits",
]


@pytest.mark.timeout(SECONDS + 30)
def test_two_nccl_ranks_average_exactly(tmp_path):
    version = torch.cuda.nccl.version()
    if version < LEAST:
        pytest.skip(f"NCCL is {'.'.join(map(str, version))}; two ranks on one GPU need {'.'.join(map(str, LEAST))}")
    environment = os.environ | {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "4",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.two_ranks", str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = []
    try:
        for rank in ranks:
            printed.append(rank.communicate(timeout=SECONDS)[0])
    except subprocess.TimeoutExpired:
        pytest.fail(f"the ranks were not done after {SECONDS} s; NCCL {version}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, text in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, text[-3000:]
        assert [line for line in text.splitlines() if line in KINDS] == KINDS, text[-3000:]
