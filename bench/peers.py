"""Peers besides DDP: FSDP2's two ways to keep all parameters on all ranks, and DeepSpeed if it is installed.

Horovod has no wheel and does not build with this torch. `bench.peer_rules` gives the buckets that it would send.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

from bench.baselines import Wrap

__all__ = ["REPLICATE", "SHARDED", "Peer", "backward_of", "peers"]

REPLICATE = "FSDP2 replicate"
SHARDED = "FSDP2 sharded, gathered once"
STAGES = {"DeepSpeed stage 0": 0, "DeepSpeed stage 1": 1}


class Peer(nn.Module):
    """A wrapper that keeps its gradients, or starts a backward, in its own way.

    Args:
        module: the module, or what the library made of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        """Run the module."""
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of `loss`, as the library's manual says."""
        loss.backward()

    def gradients(self) -> list[Tensor]:
        """Return the whole gradients after a backward, in the order of `parameters()`. Call it on every rank."""
        raise NotImplementedError


def backward_of(wrapped: nn.Module) -> Callable[[Tensor], None]:
    """Return the function that runs the backward of a loss of `wrapped`."""
    return wrapped.backward if isinstance(wrapped, Peer) else Tensor.backward


class _Fsdp2(Peer):
    """Each child with parameters is a group of its own, as FSDP2's guide advises; the rest is one group.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    def __init__(self, module: nn.Module, *, shard: bool) -> None:
        # Parameters stay gathered until the backward has used them. Otherwise each would travel once more.
        wrap = partial(fully_shard, reshard_after_forward=False) if shard else replicate
        for child in module.children():
            if any(True for _ in child.parameters()):
                wrap(child)
        wrap(module)
        if next(module.parameters()).device.type == "cpu":
            for part in module.modules():
                if hasattr(part, "set_force_sum_reduction_for_comms"):
                    part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        super().__init__(module)

    def gradients(self) -> list[Tensor]:
        return [_whole(param.grad) for param in self.module.parameters() if param.grad is not None]


def _whole(grad: Any) -> Tensor:
    whole: Tensor = grad.full_tensor()
    return whole


class _DeepSpeed(Peer):
    """DeepSpeed's engine with float32 gradients, its default bucket size, and no step of its optimizer."""

    def __init__(self, module: nn.Module, *, stage: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if next(module.parameters()).is_cuda else "cpu")
        # It reads the ranks from the environment, as its launcher sets them, although the group exists.
        os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
        os.environ |= {"LOCAL_RANK": str(dist.get_rank())}
        import deepspeed

        params = list(module.parameters())
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=params,
            optimizer=torch.optim.SGD(params, lr=0.0),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
        )
        super().__init__(engine)

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss)

    def gradients(self) -> list[Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return [safe_get_full_grad(param) for param in self.module.module.parameters()]


def peers(ranks: int) -> dict[str, Wrap]:
    """Return the peers that send something in a group of so many ranks.

    FSDP2's `fully_shard` and DeepSpeed send nothing in a group of one rank, so their times would mean nothing.

    Args:
        ranks: size of the group.

    Example:
        >>> from bench.peers import peers
        >>> list(peers(1))
        ['FSDP2 replicate']
    """
    found: dict[str, Wrap] = {REPLICATE: partial(_Fsdp2, shard=False)}
    if ranks > 1:
        found[SHARDED] = partial(_Fsdp2, shard=True)
        if importlib.util.find_spec("deepspeed") is not None:
            found |= {name: partial(_DeepSpeed, stage=stage) for name, stage in STAGES.items()}
    return found
