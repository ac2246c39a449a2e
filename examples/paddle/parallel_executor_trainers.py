"""Several processes, each with several devices: `num_trainers` and `trainer_id` of `paddle.static.ParallelExecutor`.

    CPU_NUM=2 python -m dpfuse.launch --nproc_per_node 2 examples/paddle/parallel_executor_trainers.py

With GPUs, a process uses the card that the launcher gave it. Without GPUs, it uses CPU_NUM CPU devices. Gradients are
averaged over all devices of all processes. Paddle can do this only with GPUs.
"""

from __future__ import annotations

import numpy as np
import torch
from report import fingerprint, say

import dpfuse.paddle.distributed as dist
from dpfuse.paddle import static

STEPS = 10


def main() -> None:
    dist.init_parallel_env()
    program = static.Program()
    with static.program_guard(program):
        x = static.data(name="x", shape=[None, 4], dtype="float32")
        t = static.data(name="t", shape=[None, 1], dtype="float32")
        fc = torch.nn.Linear(4, 1)  # different weights in each process, until those of trainer 0 replace them
        loss = torch.nn.functional.mse_loss(fc(x), t)
        program.minimize(loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    exe = static.ParallelExecutor(
        use_cuda=torch.cuda.is_available(),
        main_program=program,
        loss_name=loss.name,
        num_trainers=dist.get_world_size(),
        trainer_id=dist.get_rank(),
    )
    for step in range(STEPS):
        samples = np.random.default_rng([dist.get_rank(), step]).random(size=(8, 4)).astype("float32")
        feed = {"x": samples, "t": samples.sum(axis=1, keepdims=True)}
        (losses,) = exe.run(feed=feed, fetch_list=[loss])
    say(f"{exe.device_count} devices, loss {losses.mean():.4f}, weights {fingerprint(fc)}")


if __name__ == "__main__":
    main()
