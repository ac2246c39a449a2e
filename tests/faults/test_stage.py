"""The stage: what it sees of ranks that will not end, crash, are stopped, or leave processes behind."""

from __future__ import annotations

import json

import pytest

from tests.distributed.processes import run

PROGRAM = """
import json, os, signal, time
from tests.faults import stage

stage.GRACE = 1.0
stage.LIBC.prctl(stage.PR_SET_CHILD_SUBREAPER, 1)

def leave_one_behind():
    if os.fork() == 0:
        time.sleep(60)

def ignore():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)

WAYS = {
    "well": lambda: None,
    "error": lambda: os._exit(3),
    "crash": os.abort,
    "hang": lambda: time.sleep(60),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stopped for good": ignore,
    "leaves one behind": leave_one_behind,
}

def rank(way):
    pid = os.fork()
    if pid == 0:
        way()
        os._exit(0)
    return pid

seen = {name: stage.watched([rank(way)], 2.0) for name, way in WAYS.items()}
print(json.dumps({name: [one["codes"], one["left"]] for name, one in seen.items()}))
"""


@pytest.mark.slow
def test_every_end_is_seen_for_what_it_is() -> None:
    done = run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "well": [[0], 0],
        "error": [[3], 0],
        "crash": [[-6], 0],
        "hang": [[None], 0],
        "stopped": [[0], 0],
        "stopped for good": [[None], 0],
        "leaves one behind": [[0], 1],
    }
