"""accelerate: one line before `Accelerator.prepare`. The program also runs with torch's DDP, with the same results.

    python -m dpfuse.launch --nproc_per_node 2 examples/adoption/with_accelerate.py

The line is [1]. The rest is an accelerate program: gradient accumulation, `no_sync` with `trigger_sync_in_backward`,
uneven inputs, a communication hook, `unwrap_model`. Each part runs twice, and losses and weights are compared bit by
bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import digits
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType, set_seed
from checklist import Checklist, same_bits, state_of
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, Subset

import dpfuse

ACCUMULATE = 2
Result = tuple[nn.Module, list[Tensor]]  # the wrapped model, and tensors that must be equal for both wrappers


def accumulate(accelerator: Accelerator) -> Result:
    """Train an epoch with a step every second batch: accelerate switches the synchronisation off in between."""
    model, optimizer, loader, schedule = prepared(accelerator)
    losses = []
    for pictures, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(pictures), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [*losses, *state_of(model)]


def synchronise_late(accelerator: Accelerator) -> Result:
    """Run two forwards inside `no_sync`. Only the second backward synchronises: `trigger_sync_in_backward`."""
    model, optimizer, loader, _ = prepared(accelerator)
    batches, losses = iter(loader), []
    for _ in range(5):
        with accelerator.no_sync(model):
            first, second = (F.cross_entropy(model(x), y) for x, y in (next(batches), next(batches)))
        accelerator.backward(first)
        alone = [param.grad.clone() for param in model.parameters()]
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        losses += [first.detach(), second.detach(), *alone, *(param.grad.clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def uneven(accelerator: Accelerator) -> Result:
    """Train with one more batch on rank 0 than on other ranks. No rank waits forever.

    The statistics of BatchNorm are not compared: at the end, DDP has those of one step earlier.
    """
    model, optimizer, loader, _ = prepared(accelerator, pictures=16 * (2 * accelerator.num_processes + 1))
    loader.batch_sampler.even_batches = False
    losses = []
    # On GPUs these two lines are `accelerator.join_uneven_inputs([model], even_batches=False)`; it ignores CPUs.
    with Join([model]):
        for pictures, labels in loader:
            loss = F.cross_entropy(model(pictures), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert len(losses) == (3 if accelerator.is_main_process else 2)
    return model, [*losses, *model.parameters()]


def prepared(accelerator: Accelerator, pictures: int | None = None):  # type: ignore[no-untyped-def]
    """Return model, optimizer, loader and schedule from accelerate."""
    set_seed(0)
    data = digits.dataset()
    loader = DataLoader(Subset(data, range(pictures or len(data))), batch_size=16, shuffle=True)
    model = digits.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    wrapped, *others = accelerator.prepare(model, optimizer, loader, schedule)
    assert accelerator.unwrap_model(wrapped) is model is not wrapped
    return wrapped, *others


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    plain = DistributedDataParallelKwargs(bucket_cap_mb=1)
    half = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16, gradient_as_bucket_view=True)
    parts: list[tuple[str, Callable[[Accelerator], Result], DistributedDataParallelKwargs]] = [
        (f"accumulation over {ACCUMULATE} batches, clipping, a schedule", accumulate, plain),
        ("no_sync and trigger_sync_in_backward", synchronise_late, plain),
        ("a rank with more batches", uneven, plain),
        ("fp16 gradients through a kwargs handler", accumulate, half),
    ]
    for name, part, handler in parts:
        results = []
        for patched in (True, False):
            context: AbstractContextManager[object] = dpfuse.patch() if patched else contextlib.nullcontext()  # [1]
            with context:
                accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, kwargs_handlers=[handler])
                model, values = part(accelerator)
            assert isinstance(model, dpfuse.DistributedDataParallel) == patched
            results.append(values)
        checklist.check(f"{name}: {len(results[0])} losses and tensors equal DDP's bitwise", same_bits(*results))
    checklist.end()


if __name__ == "__main__":
    main()
