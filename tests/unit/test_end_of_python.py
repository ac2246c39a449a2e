"""Threads that need Python's lock when Python ends get it: else the process is aborted."""

from __future__ import annotations

import pytest

from tests.distributed.processes import run

PROGRAM = """
import atexit, sys, threading
ran = []
atexit.register(lambda: print("the thread ran:", bool(ran)))  # what is registered first is called last
import torch, torch.distributed as dist
import dpfuse

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = dpfuse.DataParallel(torch.nn.Linear(4, 2)) if sys.argv[1] == "wrapped" else None
model = None
dist.destroy_process_group()
gate = threading.Lock()
gate.acquire()
threading.Thread(target=lambda: (gate.acquire(), ran.append(1)), daemon=True).start()
sys.setswitchinterval(100)  # seconds: nothing interrupts this thread any more
gate.release()
"""


@pytest.mark.parametrize(
    ("kind", "ran"), [("wrapped", True), pytest.param("nothing wrapped", False, marks=pytest.mark.slow)]
)
def test_a_thread_that_waits_for_python_runs_before_the_end(tmp_path, kind, ran):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run(script, kind, warm=False, GLOO_SOCKET_IFNAME="lo")
    assert done.stdout.splitlines()[-1] == f"the thread ran: {ran}", done.stderr
