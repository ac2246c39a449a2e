"""A state dict's round trip: the example of `paddle.DataParallel.state_dict` and `set_state_dict`.

    python -m dpfuse.launch --nproc_per_node 2 examples/paddle/state_dict.py

The names in the file are those of the bare module, so it fits a wrapped model and a bare one. Here each rank writes its
own file, because the ranks may have no common disk. A training saves only on rank 0.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from report import fingerprint, say
from torch import nn

import dpfuse.paddle as paddle
import dpfuse.paddle.distributed as dist


def main() -> None:
    dist.init_parallel_env()
    device = dist.ParallelEnv().device_type
    model = paddle.DataParallel(nn.Embedding(10, 10).to(device))
    before = fingerprint(model)

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "embedding.pdparams"))
        paddle.save(model.state_dict(), path)
        nn.init.zeros_(model.weight)  # as if training had gone wrong
        missing, unexpected = model.set_state_dict(paddle.load(path))

        bare = nn.Embedding(10, 10)
        bare.load_state_dict(paddle.load(path))

    assert (missing, unexpected) == ([], []), "the names of the file are not those of the model"
    assert fingerprint(model) == before, "the loaded weights are not the saved weights"
    assert torch.equal(bare.weight, model.weight.cpu()), "the bare module has other weights"
    say(f"saved and loaded {', '.join(model.state_dict())}, weights {before}")


if __name__ == "__main__":
    main()
