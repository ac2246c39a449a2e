"""Training on several devices of one process, and testing between the steps: `paddle.static.ParallelExecutor`.

    CPU_NUM=2 python examples/paddle/parallel_executor_train.py

It runs on all visible GPUs. Without GPUs, it runs on as many CPU devices as the environment variable CPU_NUM says. The
test program shares the variables of the training program, so its results are up to date on every device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from dpfuse.paddle import static

STEPS = 20


def main() -> None:
    use_cuda = torch.cuda.is_available()
    exe = static.Executor(static.CUDAPlace(0) if use_cuda else static.CPUPlace())

    train_program, startup_program = static.Program(), static.Program()
    with static.program_guard(train_program, startup_program):
        x = static.data(name="X", shape=[None, 4], dtype="float32")
        t = static.data(name="T", shape=[None, 1], dtype="float32")
        hidden = torch.tanh(nn.Linear(4, 10)(x))
        loss = nn.functional.mse_loss(nn.Linear(10, 1)(hidden), t)
        test_program = train_program.clone(for_test=True)
        train_program.minimize(loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    exe.run(startup_program)

    train_exe = static.ParallelExecutor(use_cuda=use_cuda, main_program=train_program, loss_name=loss.name)
    test_exe = static.ParallelExecutor(use_cuda=use_cuda, main_program=test_program, share_vars_from=train_exe)

    samples = np.random.random(size=(16, 4)).astype("float32")
    feed = {"X": samples, "T": samples.sum(axis=1, keepdims=True)}  # cut into one part for each device
    losses = []
    for _ in range(STEPS):
        (before,) = train_exe.run(feed=feed, fetch_list=[loss.name])  # one loss of each device, before the step
        (after,) = test_exe.run(feed=feed, fetch_list=[loss.name])
        losses.append((before.mean(), after.mean()))

    following = [before for before, _ in losses[1:]]
    assert np.allclose([after for _, after in losses[:-1]], following), "the test program lags behind"
    assert losses[-1][1] < 0.5 * losses[0][0], "nothing was learned"
    print(f"{train_exe.device_count} devices, loss {losses[0][0]:.4f}, after {STEPS} steps {losses[-1][1]:.4f}")


if __name__ == "__main__":
    main()
