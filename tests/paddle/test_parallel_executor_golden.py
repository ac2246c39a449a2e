"""ParallelExecutor against what Paddle's did: how a batch is dealt out, and what training gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dpfuse import DPFuseError
from dpfuse.paddle import static
from tests.paddle.programs import program_of

GOLDEN = Path(__file__).parent.parent / "golden"
SPLITS = json.loads((GOLDEN / "pe_split.json").read_text())
TRAININGS = json.loads((GOLDEN / "pe_train.json").read_text())


class Linear(nn.Module):
    """x @ W + B, and the mean squared error."""

    def __init__(self, weight, bias):
        super().__init__()
        self.W = nn.Parameter(torch.tensor(weight))
        self.B = nn.Parameter(torch.tensor(bias))

    def forward(self, x, t):
        y = x @ self.W + self.B
        return {"y": y, "loss": ((y - t) ** 2).mean()}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "case", SPLITS, ids=lambda case: f"{case['samples']}-on-{case['devices']}-{'train' if case['training'] else 'test'}"
)
def test_a_batch_is_dealt_out_as_by_paddle(case, monkeypatch):
    monkeypatch.setenv("CPU_NUM", str(case["devices"]))
    program = program_of(Linear([[1.0]], [0.0]), x=[None, 1], t=[None, 1])
    loss_name = "loss" if case["training"] else None
    exe = static.ParallelExecutor(False, loss_name, program, scope=static.Scope())
    rows = np.arange(case["samples"], dtype=np.float32)[:, None]
    feed = {"x": rows, "t": rows}
    if "error" in case:
        chunks, devices = re.search(r"number\((\d+)\).*count\((\d+)\)", case["error"]).groups()
        text = f"the {case['samples']} samples of 'x' make only {chunks} chunks .* than the {devices} devices \\(CPU\\)"
        with pytest.raises(DPFuseError, match=text):
            exe.run(["x"], feed)
        return
    (chunks,) = exe.run(["x"], feed, return_merged=False)
    assert [len(chunk) for chunk in chunks] == case["sizes"]
    assert [chunk[0, 0] for chunk in chunks] == case["first_row_of_chunk"]
    (together,) = exe.run(["x"], feed)
    assert np.array_equal(together, rows)


@pytest.mark.parametrize("case", TRAININGS, ids=lambda case: case["id"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "one by one"])
def test_training_gives_what_paddle_gave(case, fused, monkeypatch):
    monkeypatch.setenv("CPU_NUM", str(case["devices"]))
    module = Linear(case["W0"], case["B0"])
    program = program_of(module, **{name: [None, len(case["steps"][0][name][0])] for name in ("x", "t")})
    test_program = program.clone(for_test=True)
    program.minimize("loss", lambda params: torch.optim.SGD(params, lr=case["lr"]))
    build = static.BuildStrategy()
    build.fuse_all_reduce_ops = fused
    train = static.ParallelExecutor(False, "loss", program, build_strategy=build)
    test = static.ParallelExecutor(False, main_program=test_program, share_vars_from=train)
    for step in case["steps"]:
        feed = {name: np.array(step[name], np.float32) for name in ("x", "t")}
        *got, weights = train.run(["loss", "y", "W@GRAD", "W"], feed)
        for value, name in zip(got, ("loss", "y", "W_grad"), strict=True):
            assert value.shape == np.array(step[name]).shape
            np.testing.assert_allclose(value, np.array(step[name]), rtol=0, atol=1e-5)
        (test_loss,) = test.run(["loss"], feed)
        np.testing.assert_allclose(test_loss, step["test_loss_after"], rtol=0, atol=1e-5)
    per_device = np.array(case["W_per_device"])
    np.testing.assert_allclose(weights, per_device.reshape(weights.shape), rtol=0, atol=1e-5)
    (weights,) = train.run(["W"], feed, return_merged=False)
    (after,) = test.run(["W"], feed, return_merged=False)
    assert all(np.array_equal(weights[0], weight) for weight in [*weights, *after])
    assert np.array_equal(module.W.detach().numpy(), weights[0])
