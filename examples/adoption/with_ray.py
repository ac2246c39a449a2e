"""Ray Train: `dpfuse.patch()` in the training function, before `ray.train.torch.prepare_model`.

    python examples/adoption/with_ray.py

The line is [1]. Ray starts the two workers, so this needs no launcher. They also train with torch's DDP. Losses and
weights must be equal bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpfuse

FOLDER = Path(__file__).resolve().parent
WORKERS = 2


def train_once(patched: bool) -> tuple[type, list[Tensor]]:
    """Train an epoch. Return the type of the wrapper, losses and weights."""
    import digits
    from checklist import state_of

    torch.manual_seed(0)
    with dpfuse.patch() if patched else contextlib.nullcontext():  # [1] elsewhere just dpfuse.patch()
        model = prepare_model(digits.network())
    loader = prepare_data_loader(DataLoader(digits.dataset(), batch_size=32, shuffle=True))
    loader.sampler.set_epoch(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for pictures, labels in loader:
        loss = F.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return type(model), [*losses, *state_of(model)]


def worker(config: dict[str, str]) -> None:
    """Compare both wrappers. Ray runs this on each rank; an exception ends the job and the program."""
    sys.path.append(str(FOLDER))
    from checklist import same_bits

    wrapper, ours = train_once(patched=True)
    torchs, theirs = train_once(patched=False)
    assert (wrapper, torchs) == (dpfuse.DistributedDataParallel, nn.parallel.DistributedDataParallel)
    if not same_bits(ours, theirs):
        raise RuntimeError(f"rank {dist.get_rank()} does not train as with torch's DDP")
    if dist.get_rank() == 0:
        Path(config["report"]).write_text(f"passed  {len(ours)} losses and tensors equal DDP's bitwise")


def main() -> None:
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.txt")
        TorchTrainer(
            worker,
            train_loop_config={"report": str(report)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        print(report.read_text())
    ray.shutdown()


if __name__ == "__main__":
    main()
