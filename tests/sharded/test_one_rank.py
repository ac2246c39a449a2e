"""What all ranks must call, called on one rank only: an error that names both places, and no hang."""

from __future__ import annotations

import pytest

from tests.distributed.processes import launch
from tests.patience import patience

PROGRAM = """
import sys
import torch
import dpfuse

dpfuse.init_parallel_env()
model = dpfuse.DataParallel(torch.nn.Linear(200, 200), stall_timeout=float(sys.argv[2]))
optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(8, 200)).sum().backward()
    if step == 2 and dpfuse.get_rank() == 0 and sys.argv[1] == "norm":
        model.clip_grad_norm_(1.0)
    optimizer.step()
    if step == 2 and dpfuse.get_rank() == 0 and sys.argv[1] == "state":
        torch.save(optimizer.state_dict(), "state.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "other"), [("norm", "waits for parameters in the optimizer's step"), ("state", "waits for bucket 0")]
)
def test_a_call_on_one_rank_only_is_named(tmp_path, what, other):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    # Below this limit no heartbeat may come late: that would be another error.
    done = launch("--nproc_per_node", "2", script, what, patience(3), timeout=60)
    assert done.returncode not in (0, None)
    assert "but not for the same collective" in done.stderr
    assert "rank 0 waits for the other ranks in a norm, whole gradient or state dict, before step 4" in done.stderr
    assert f"rank 1 {other}" in done.stderr
    assert "program.py:" in done.stderr
