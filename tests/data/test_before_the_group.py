"""Samplers that are made before the process group, in processes that no variable tells of the job, as `mp.spawn`'s."""

from __future__ import annotations

import json

import pytest

from tests.distributed.processes import start
from tests.patience import patience

PROGRAM = """
import json, sys
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from dpfuse.data import ResumableBatchSampler, ResumableIterableDataset
from dpfuse.paddle.io import DistributedBatchSampler

class Numbers:
    def __iter__(self):
        return iter(range(12))

if __name__ == "__main__":
    store, rank = sys.argv[1], int(sys.argv[2])
    sampler = ResumableBatchSampler(range(12), 3)
    streams = [ResumableIterableDataset(Numbers(), 3) for _ in range(3)]
    paddle = DistributedBatchSampler(range(12), 3)
    loader = DataLoader(range(12), batch_sampler=sampler)
    alone = (len(sampler), sampler.num_replicas)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    expected = [*DistributedSampler(range(12))]
    length = len(loader)
    kinds = {
        "map": sampler.track(loader),
        "stream": streams[0].track(DataLoader(streams[0], batch_size=3)),
        "forked": DataLoader(streams[1], batch_size=3, num_workers=1, multiprocessing_context="fork"),
        "spawned": DataLoader(streams[2], batch_size=3, num_workers=1, multiprocessing_context="spawn"),
    }
    given = {name: [int(n) for batch in kind for n in batch] for name, kind in kinds.items()}
    refused = ""
    try:
        next(iter(paddle))
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    print(json.dumps([alone, length, expected, [*range(rank, 12, 2)], given, sampler.num_replicas, refused]))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_rank_gets_its_own_samples_once_there_is_a_group(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    jobs = [start(program, tmp_path / "store", rank, warm=True, GLOO_SOCKET_IFNAME="lo") for rank in range(2)]
    told = [job.communicate(timeout=patience(100)) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], told
    for out, _ in told:
        alone, length, order, turns, given, replicas, refused = json.loads(out)
        assert alone == [4, 1]
        assert (length, replicas) == (2, 2)
        assert given["map"] == order
        assert given["stream"] == given["forked"] == given["spawned"] == turns
        assert refused.startswith("DPFuseError: the sampler was made for 1 rank(s), and the process group has 2")
