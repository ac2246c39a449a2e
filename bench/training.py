"""Models in training: each library's wrapper with an optimizer, all of which must come to the same weights."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import dpfuse
from bench.models import Workload

__all__ = [
    "IN_BACKWARD",
    "KEPT",
    "REFERENCE",
    "SHARDED",
    "ZERO",
    "Train",
    "Trained",
    "Update",
    "all_contenders",
    "memory_of",
    "muon_contenders",
    "plain_contenders",
    "prove_elements",
    "prove_way",
    "with_copies",
]

REFERENCE = "DDP default"
SHARDED = "dpfuse sharded"
IN_BACKWARD = "dpfuse sharded, stepped in backward"
KEPT = "dpfuse sharded, weights in use elsewhere"
ZERO = "DDP with ZeroRedundancyOptimizer"
VIEWS = "DDP views"
STEPS = 3  # before the weights are compared


class Update(NamedTuple):
    """An optimizer: its class and hyperparameters."""

    kind: type[optim.Optimizer]
    settings: Mapping[str, Any]

    def of(self, params: Iterable[nn.Parameter]) -> optim.Optimizer:
        """Return a plain optimizer of these parameters."""
        return self.kind(params, **self.settings)


class Trained(NamedTuple):
    """A model that is trained in one way."""

    step: Callable[[], None]
    weights: Callable[[], list[Tensor]]  # whole ones; to be called on all ranks
    bucket_bytes: Callable[[], int] | None = None


Train = Callable[[Workload], Trained]


def _stepped(module: nn.Module, wrapped: nn.Module, optimizer: optim.Optimizer, workload: Workload) -> Trained:
    def step() -> None:
        workload.loss(wrapped).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trained(step, lambda: [param.detach() for param in module.parameters()])


def _ddp(update: Update, workload: Workload, **options: bool) -> Trained:
    wrapped = DistributedDataParallel(workload.module, **options)
    return _stepped(workload.module, wrapped, update.of(wrapped.parameters()), workload)


def _ddp_with_copies(update: Update, workload: Workload, **options: bool) -> Trained:
    """On each rank, update float32 copies of all 16-bit parameters, as programs do it by hand."""
    wrapped = DistributedDataParallel(workload.module, **options)
    params = list(workload.module.parameters())
    copies = [nn.Parameter(param.detach().float()) for param in params]
    grads = [torch.empty_like(own) for own in copies]
    for own, grad in zip(copies, grads, strict=True):
        own.grad = grad
    optimizer = update.of(copies)

    def step() -> None:
        workload.loss(wrapped).backward()
        with torch.no_grad():
            torch._foreach_copy_(grads, [param.grad for param in params])
            optimizer.step()
            torch._foreach_copy_(params, copies)
        wrapped.zero_grad()

    return Trained(step, lambda: [param.detach() for param in params])


def _zero(update: Update, workload: Workload) -> Trained:
    wrapped = DistributedDataParallel(workload.module, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), update.kind, parameters_as_bucket_view=True, **update.settings
    )
    return _stepped(workload.module, wrapped, optimizer, workload)


def _dpfuse(update: Update, workload: Workload) -> Trained:
    wrapped = dpfuse.DataParallel(workload.module)
    trained = _stepped(workload.module, wrapped, update.of(wrapped.parameters()), workload)
    return trained._replace(bucket_bytes=partial(_bucket_bytes, wrapped))


def _sharded(update: Update, workload: Workload, **options: Any) -> Trained:
    wrapped = dpfuse.DataParallel(workload.module)
    optimizer = dpfuse.ShardedOptimizer(wrapped, update.kind, **options, **update.settings)
    trained = _stepped(workload.module, wrapped, optimizer, workload)
    return trained._replace(bucket_bytes=partial(_bucket_bytes, wrapped))


def _sharded_kept(update: Update, workload: Workload, **options: Any) -> Trained:
    """As `_sharded`, where the program keeps a view of each parameter, so that none may be moved."""
    kept = [param.data for param in workload.module.parameters()]
    trained = _sharded(update, workload, **options)
    return trained._replace(weights=lambda: kept)


def _fsdp2(update: Update, workload: Workload) -> Trained:
    module = workload.module
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, reshard_after_forward=False)
    fully_shard(module, reshard_after_forward=False)
    if dist.get_backend() == "gloo":
        for part in module.modules():
            if hasattr(part, "set_force_sum_reduction_for_comms"):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    trained = _stepped(module, module, update.of(module.parameters()), workload)

    def weights() -> list[Tensor]:
        return [param.full_tensor().detach() for param in module.parameters()]

    return trained._replace(weights=weights)


def _deepspeed(update: Update, workload: Workload) -> Trained:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= ranks
    import deepspeed

    params = list(workload.module.parameters())
    engine, *_ = deepspeed.initialize(
        model=workload.module,
        model_parameters=params,
        optimizer=update.of(params),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> None:
        engine.backward(workload.loss(engine))
        engine.step()

    return Trained(step, lambda: [param.detach() for param in workload.module.parameters()])


def _sharded_contenders(update: Update, **options: Any) -> dict[str, Train]:
    """Return the ways in which dpfuse's `ShardedOptimizer` works, with these `options` of it."""
    sharded = partial(_sharded, update, **options)
    return {
        SHARDED: sharded,
        IN_BACKWARD: partial(sharded, step_in_backward=True),
        KEPT: partial(_sharded_kept, update, **options),
    }


def muon_contenders(update: Update) -> dict[str, Train]:
    """Return those that give an optimizer whole matrices: all but FSDP2, which cuts them, and DeepSpeed."""
    return plain_contenders(update) | {ZERO: partial(_zero, update)}


def plain_contenders(update: Update) -> dict[str, Train]:
    """Return DDP and dpfuse with the plain optimizer on every rank, and the sharded ones: what any group can have."""
    ddp = partial(_ddp, update)
    views = partial(ddp, gradient_as_bucket_view=True)
    return {REFERENCE: ddp, VIEWS: views, "dpfuse": partial(_dpfuse, update)} | _sharded_contenders(update)


def all_contenders(update: Update) -> dict[str, Train]:
    """Return `plain_contenders`, and what needs a group that torch knows well; DeepSpeed if installed."""
    found = plain_contenders(update) | {ZERO: partial(_zero, update)}
    found["FSDP2 sharded, gathered once"] = partial(_fsdp2, update)
    if importlib.util.find_spec("deepspeed") is not None and not torch.cuda.is_available():
        found["DeepSpeed stage 1"] = partial(_deepspeed, update)
    return found


def with_copies(update: Update) -> dict[str, Train]:
    """Return the contenders for 16-bit parameters with float32 copies: DDP by hand, and the sharded ones."""
    ddp = partial(_ddp_with_copies, update)
    views = partial(ddp, gradient_as_bucket_view=True)
    return {REFERENCE: ddp, VIEWS: views} | _sharded_contenders(update, master_dtype=torch.float32)


def prove_elements(trained: Mapping[str, Trained], *, rtol: float, atol: float) -> None:
    """Assert that a few steps give all contenders the weights of DDP, each element as `torch.allclose` compares it."""
    _train(trained)
    expected = trained[REFERENCE].weights()
    for name, one in trained.items():
        for found, weight in zip(one.weights(), expected, strict=True):
            assert torch.allclose(found, weight, rtol=rtol, atol=atol), f"{name}: the weights differ from DDP's"


def prove_way(trained: Mapping[str, Trained], *, part: float) -> None:
    """Assert that a few steps lead all contenders to the weights of DDP, up to a part of the way they have come.

    A gradient that is zero but for rounding moves a weight either way under AdamW. So elements cannot be compared where
    kernels add in any order. The way is the sum of the absolute differences.
    """
    begin = [weight.clone() for weight in trained[REFERENCE].weights()]
    _train(trained)
    expected = trained[REFERENCE].weights()
    way = _distance(begin, expected)
    assert way > 0, "DDP has not trained"
    for name, one in trained.items():
        apart = _distance(one.weights(), expected) / way
        assert apart <= part, f"{name}: the weights differ from DDP's by {apart:.3f} of the way"


def _train(trained: Mapping[str, Trained]) -> None:
    for one in trained.values():
        for _ in range(STEPS):
            one.step()


def _distance(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    return sum(float((one.float() - other.float()).abs().sum()) for one, other in zip(some, others, strict=True))


def memory_of(one: Trained) -> dict[str, int]:
    """Do a step, and return the bytes of this rank's states and, for dpfuse, of the buckets that hold its gradients.

    float32 copies of parameters count as states. Call it on every rank.
    """
    used = {tensor.dtype for tensor in one.weights()}
    with _optimizers_that_step() as optimizers:
        one.step()
    tensors: list[Tensor] = []
    for optimizer in optimizers:
        if isinstance(optimizer, dpfuse.ShardedOptimizer):
            continue  # the optimizers of its shards are found, too
        tensors += [value for state in optimizer.state.values() for value in state.values() if _is_large(value)]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        tensors += [param for param in params if param.dtype not in used]
    facts = {"state_bytes": _nbytes(tensors)}
    if one.bucket_bytes is not None:
        facts["bucket_bytes"] = one.bucket_bytes()
    return facts


@contextmanager
def _optimizers_that_step() -> Iterator[list[optim.Optimizer]]:
    found: list[optim.Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: found.append(optimizer))
    try:
        yield found
    finally:
        handle.remove()


def _is_large(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind some tensors, each piece once."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in local}
    return sum(storage.nbytes() for storage in storages.values())


def _bucket_bytes(wrapped: dpfuse.DataParallel) -> int:
    assert wrapped.reducer is not None
    return _nbytes(bucket.parts.buffer.flat for bucket in wrapped.reducer.buckets)
