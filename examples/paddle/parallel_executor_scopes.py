"""When a `paddle.static.ParallelExecutor` frees intermediate values: the example of `drop_local_exe_scopes`.

    python examples/paddle/parallel_executor_scopes.py

Two executors train copies of one network, each in its own scope. One drops its intermediate values after every run, the
other only on request. The program sets CPU_NUM, so that there are two devices on any machine.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from dpfuse.paddle import static

STEPS = 6


def main() -> None:
    os.environ["CPU_NUM"] = "2"
    program = static.Program()
    with static.program_guard(program):
        y = torch.nn.Linear(4, 1)(static.data("x", [None, 4]))
        loss = torch.nn.MSELoss()(y, static.data("t", [None, 1]))
        program.minimize(loss, lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    weight = f"{y.name}.weight"

    def executor(iterations: int) -> static.ParallelExecutor:
        strategy = static.ExecutionStrategy()
        strategy.num_threads = 2
        strategy.num_iteration_per_drop_scope = iterations
        return static.ParallelExecutor(
            use_cuda=False, main_program=program, loss_name=loss.name, exec_strategy=strategy, scope=static.Scope()
        )

    often, seldom = executor(iterations=1), executor(iterations=100)
    for step in range(STEPS):
        x = np.random.random(size=(8, 4)).astype("float32")
        feed = {"x": x, "t": x.sum(axis=1, keepdims=True)}
        results = [exe.run([loss, weight, f"{weight}@GRAD"], feed=feed) for exe in (often, seldom)]
        assert all(map(np.array_equal, *results)), "dropping scopes changed a result"
        if step == STEPS // 2:
            seldom.drop_local_exe_scopes()  # for example before something else needs the memory
    print(f"{STEPS} steps, the same whenever scopes are dropped; loss {results[0][0].mean():.4f}")


if __name__ == "__main__":
    main()
