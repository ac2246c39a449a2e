"""A loader that accelerate's `prepare` has taken, in jobs of 2, 3 and 1 ranks, one after the other."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec

import pytest

from tests.distributed.processes import launch

PROGRAM = """
import json, sys, warnings
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
import dpfuse
from dpfuse.data import ResumableBatchSampler

folder, length, batch_size, steps, workers = sys.argv[1], *map(int, sys.argv[2:])
dpfuse.init_parallel_env()
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
data = range(length)
sampler = ResumableBatchSampler(data, batch_size)
with dpfuse.patch():
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_sampler=sampler, num_workers=workers)
    )
warnings.simplefilter("ignore")
step = dpfuse.load_checkpoint(folder, model, sampler=sampler).step
stop, given = step + steps, []
while step < stop:
    for batch in sampler.track(loader):
        accelerator.backward(model(batch.float()[:, None]).mean())
        optimizer.step()
        optimizer.zero_grad()
        given += [[sampler.epoch, sample] for sample in batch.tolist()]
        step += 1
        if step == stop:
            dpfuse.save_checkpoint(folder, accelerator.unwrap_model(model), step=step, sampler=sampler)
            break
parts = [given]
if accelerator.num_processes > 1:
    parts = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(parts, given)
    torch.distributed.destroy_process_group()
if accelerator.is_main_process:
    for part in parts:
        print("given", json.dumps(part))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed; `make test-all` does it")
def test_jobs_with_prepared_loaders_train_each_sample_once(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given, length = [], 29
    # 29 samples: 12 in two steps, 12 in two, the last 5 in two of at most 4; then an epoch with one step.
    for size, batch_size, steps, workers in ((2, 3, 2, 0), (3, 2, 2, 2), (1, 4, 3, 0)):
        done = launch("--nproc_per_node", size, program, tmp_path / "saved", length, batch_size, steps, workers)
        assert done.returncode == 0, done.stdout + done.stderr
        for line in done.stdout.splitlines():
            if "given " in line:
                given += map(tuple, json.loads(line.partition("given ")[2]))
    counted = Counter(given)
    assert {*counted.values()} == {1}
    assert {pair for pair in counted if pair[0] == 0} == {(0, sample) for sample in range(length)}
    assert sum(pair[0] == 1 for pair in counted) == 4
