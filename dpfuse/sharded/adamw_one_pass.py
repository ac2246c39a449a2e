"""AdamW of 16-bit parameters with float32 copies, in one pass over the memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from dpfuse.sharded.groups import State
from dpfuse_kernels import adamw_step

__all__ = ["step_in_one_pass", "takes_one_pass"]


def takes_one_pass(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], device: torch.device) -> bool:
    """Whether `step_in_one_pass` does what an optimizer of this class does with these hyperparameters.

    torch's operations need a gradient in float32, and read and write each tensor several times.
    """
    usual = kind in (Adam, AdamW) and not (settings["amsgrad"] or settings["capturable"] or settings["differentiable"])
    return usual and device.type == "cuda" and not isinstance(settings["lr"], Tensor)


def step_in_one_pass(state: State, settings: Mapping[str, Any], master: Tensor, param: Tensor, grad: Tensor) -> None:
    """Do one step of Adam or AdamW.

    Args:
        state: of torch's optimizer, is updated; empty before the first step.
        settings: the hyperparameters.
        master: float32 copy of the parameters, [elements], is updated.
        param: the parameters in 16 bits, [elements], become its rounded values.
        grad: of them, [elements], in the dtype in which it has travelled.
    """
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
    state["step"] += 1
    adamw_step(
        grad,
        param,
        state["exp_avg"],
        state["exp_avg_sq"],
        step=int(state["step"]),
        lr=settings["lr"],
        betas=settings["betas"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        decoupled=settings["decoupled_weight_decay"],
        maximize=settings["maximize"],
        master=master,
    )
