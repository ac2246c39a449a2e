"""A call of the runtime, the driver or NCCL fails: the step raises an error, and so does the next one; nothing hangs.

A lack of memory alone may have passed in the next step.

Each case is a process of its own: an error of a device lasts as long as the process, here as there.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.pretended_gpu.test_calls import Calls

CALLS = {
    "triton launch": Calls().launches,
    "nccl allReduce": Calls().collectives,
    "cudaEventSynchronize": Calls().waits,
    "cudaEventRecord": Calls().events,
    "cudaStreamWaitEvent": 2,
    "cudaEventCreate": 1,
    "kernel": 4,
}


@pytest.mark.parametrize(
    ("call", "after"), [(call, one) for call, count in CALLS.items() for one in range(1, count + 1)]
)
@pytest.mark.parametrize("way", ["views", "face"])
def test_a_failed_call_is_an_error_on_this_rank(way, call, after):
    command = [sys.executable, "-m", "tests.pretended_gpu.fail_a_call", way, call, str(after)]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        # Torch's watchdog looks at the device ten times a second. Where it sees the error first, it ends the process.
        if not (done.returncode == -signal.SIGABRT and "Watchdog" in done.stderr):
            break
    assert done.returncode == 0, done.stderr[-2000:]
    made, first, second = json.loads(done.stdout.splitlines()[-1])
    if not made and call == "cudaEventCreate":  # torch has an event left of an earlier step
        assert (first, second) == ("", "")
        return
    assert first
    assert second or call == "cudaEventCreate"  # of which a lack of memory is the reason, and that may pass
    failed = ("pretended CUDA error", "pretended driver error", "NCCL error")
    assert any(text in first for text in failed), first
