"""accelerate's own test scripts, as they are installed, end with `patch()` as they end without it.

torchtnt and Lightning ship no scripts. `tests/clients/programs/unit.py` has the shape of the first one, and
`tests/commands/programs/lightning_loop.py` is run with the second one.
"""

from __future__ import annotations

import re

import pytest

from dpfuse.startup import startup_variables
from tests.commands.side_by_side import REPLACED, python
from tests.distributed.processes import clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# Without a GPU, test_ddp_comm_hook ends with an error of torch's class, and test_distributed_data_loop hangs with it.
WRAPS = {"test_script": True, "test_sync": True, "test_ops": False}  # whether a script wraps a model


def said(folder):
    """What each rank has printed, without what differs between two runs."""
    texts = [path.read_text() for path in sorted(folder.glob("*/attempt_0/*/stdout.log"))]
    assert len(texts) == 2
    return [re.sub(r"0x[0-9a-f]+|localhost:\d+", "", text) for text in texts]


@pytest.mark.parametrize("script", WRAPS)
def test_a_script_of_accelerate_ends_the_same(script, tmp_path):
    pytest.importorskip("accelerate")
    environ = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables = startup_variables("dpfuse.commands.replacement", clean_environment())
    done = {}
    for way, more in {"torch": {}, "dpfuse": variables}.items():
        files = ("--redirects", 1, "--log-dir", tmp_path / way)  # else lines of both ranks would mix
        command = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, *files, "-m")
        done[way] = python(*command, f"accelerate.test_utils.scripts.{script}", timeout=400, **environ, **more)
    assert [each.returncode for each in done.values()] == [0, 0], done["dpfuse"].stderr
    assert said(tmp_path / "dpfuse") == said(tmp_path / "torch")
    assert bool(REPLACED.findall(done["dpfuse"].stderr)) == WRAPS[script], done["dpfuse"].stderr
