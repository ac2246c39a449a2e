"""What the C library does with freed gradients: it keeps them for the next step once a model was wrapped."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.patience import patience

PROGRAM = """
import resource, sys, torch
from dpfuse import DataParallel  # all of dpfuse, as in a program: what is free on the heap depends on it
from dpfuse.engine.host_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    return [torch.ones(1 << 20) for _ in range(6)]  # of 4 MB each, which are 1,024 pages
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has rules of its own")
def test_the_memory_of_a_step_is_there_in_the_next_one() -> None:
    command = [sys.executable, "-c", PROGRAM]
    kept, usual = (
        int(subprocess.run([*command, how], capture_output=True, text=True, timeout=patience(60)).stdout)
        for how in ("kept", "usual")
    )
    assert kept < usual / 3
