"""Inputs and results of a `paddle.static.ParallelExecutor`: the examples of its method `run`.

    python examples/paddle/parallel_executor_feed.py

A dictionary is cut into one part for each device. A list has one dictionary for each device. Results of all devices are
concatenated, or returned as a list. The program sets CPU_NUM, so that there are two devices on any machine.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from dpfuse.paddle import static


def main() -> None:
    os.environ["CPU_NUM"] = "2"
    program = static.Program()
    with static.program_guard(program):
        y = torch.nn.Linear(2, 1)(static.data("image", [None, 2]))
        loss = y.mean()
    # Without an optimizer nothing changes between the runs; a loss is enough for gradients.
    exe = static.ParallelExecutor(use_cuda=False, main_program=program, loss_name=loss.name)
    image = np.arange(6, dtype="float32").reshape(3, 2)
    fetch_list = [y, loss, f"{y.name}.weight@GRAD"]

    def shapes(values: list[np.ndarray]) -> list[tuple[int, ...]]:
        return [value.shape for value in values]

    split = exe.run(fetch_list, feed={"image": image})
    print("a dict, merged:", shapes(split))

    dealt = exe.run(fetch_list, feed=[{"image": image[:2]}, {"image": image[2:]}])
    assert all(map(np.array_equal, split, dealt)), "3 samples are not cut into 2 and 1"
    print("a list of 2 and 1 samples: the same")

    apart = exe.run(fetch_list, feed={"image": image}, return_merged=False)
    print("on each device:", [shapes(values) for values in apart])
    gradients = apart[2]
    # Like Paddle, take the mean of the devices' means, also if the parts have different sizes.
    assert np.allclose(gradients[0], (image[:2].mean(axis=0) + image[2]) / 2), "not the mean over the devices"
    assert np.array_equal(*gradients), "the devices hold different gradients"


if __name__ == "__main__":
    main()
