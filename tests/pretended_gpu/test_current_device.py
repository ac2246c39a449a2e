"""A program need not set the current device: what a wrapper does is on the device of its parameters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.pretended_gpu.test_ways import NEED_VALUES
from tests.pretended_gpu.ways import WAYS

PROGRAM = """
import sys
import torch, torch.distributed as dist
from tests.pretended_gpu.ways import WAYS, WIDTH, plain

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
for name in sys.argv[1:]:
    way = WAYS[name]
    model = way.wrap(way.network().to("cuda:1", way.dtype))
    optimizer, do = way.optimizer(model), way.step or plain
    for _ in range(6):
        do(model, optimizer, torch.ones(8, WIDTH, device="cuda:1", dtype=way.dtype))
    torch.cuda.synchronize(1)
    count = torch.cuda.memory_stats(0).get("allocation.all.allocated", 0)
    assert count == 0, f"{name}: {count} allocations on another device than that of the model"
    assert torch.cuda.current_device() == 0, name
dist.destroy_process_group()
"""
OWN_STREAMS = {"two streams", "two streams, private"}  # whose network takes a stream of the current device
NAMES = [name for name in WAYS if not ({name} & (OWN_STREAMS | NEED_VALUES.keys()))]


@pytest.mark.parametrize("part", range(4))
def test_nothing_is_allocated_on_the_current_device_that_is_not_the_models(part):
    command = [sys.executable, "-c", PROGRAM, *NAMES[part::4]]
    done = subprocess.run(
        command, env=os.environ | {"PRETENDED_DEVICES": "2"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
