"""Training loops that are wrong on every rank, in the styles of public programs. Each takes at most 24 steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.loops.nets import Wrapping, batch, batches, loss_of, mlp, seeded, train, with_sgd

__all__ = ["PROGRAMS"]

Loop = Callable[[int, int], None]  # gets rank and number of ranks
PROGRAMS: dict[str, tuple[str, Loop]] = {}  # the code of the finding, and the program, by its name


def named(code: str) -> Callable[[Loop], Loop]:
    """Add a program that is to be named with this code."""

    def add(program: Loop) -> Loop:
        PROGRAMS[program.__name__] = (code, program)
        return program

    return add


# --- DPF-L01: local gradients in a step ---


@named("DPF-L01")
def build_nanogpt_switch_behind_the_forward(rank, size):
    """karpathy/build-nanogpt#30: the flag is set between forward and backward, and acts on the next forward."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
    grad_accum_steps, loader = 4, batches(rank, 96)
    for _step in range(24):
        optimizer.zero_grad()
        loss_accum = 0.0
        for micro_step in range(grad_accum_steps):
            x, y = next(loader)
            loss = loss_of(model(x), y) / grad_accum_steps
            loss_accum += loss.detach()
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            loss.backward()
        dist.all_reduce(loss_accum)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


@named("DPF-L01")
def build_nanogpt_with_private_gradients_that_are_filled_with_zeros(rank, size):
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp(), gradient_as_bucket_view=False))
    loader = batches(rank, 48)
    for _step in range(24):
        optimizer.zero_grad(set_to_none=False)
        for micro_step in range(2):
            x, y = next(loader)
            loss = loss_of(model(x), y)
            model.require_backward_grad_sync = micro_step == 1
            loss.backward()
        optimizer.step()


@named("DPF-L01")
def funasr_step_one_batch_behind_the_average(rank, size):
    """modelscope/FunASR#3472: no_sync() counts from the next batch, and the step from this one."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    accum_grad = 3
    for batch_idx, (x, y) in enumerate(batches(rank, 72)):
        my_context = nullcontext if (batch_idx + 1) % accum_grad == 0 else model.no_sync
        with my_context():
            (loss_of(model(x), y) / accum_grad).backward()
        if batch_idx % accum_grad == 0:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def average_of_the_first_batch_only(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 4 != 0):
            loss_of(model(x), y).backward()
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def forward_outside_and_second_backward_inside_no_sync(rank, size):
    """The auxiliary loss has its backward in no_sync(), for it was to save an average."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 10):
        optimizer.zero_grad()
        outputs = model(x)
        loss_of(outputs, y).backward(retain_graph=True)
        with model.no_sync():
            outputs.square().mean().backward()
        optimizer.step()


@named("DPF-L01")
def scaler_and_two_optimizers(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    layers = [model.module[0], model.module[2]]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in layers]
    for index, (x, y) in enumerate(batches(rank, 20)):
        with model.no_sync(enabled=index % 2 == 1):
            scaler.scale(loss_of(model(x), y)).backward()
        if index % 2:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()


@named("DPF-L01")
def unscaled_and_cut_at_one_value(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 1):
            scaler.scale(loss_of(model(x), y)).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@named("DPF-L01")
def unscaled_and_cut_so_that_all_values_are_of_one_size(rank, size):
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 1):
            scaler.scale(loss_of(model(x), y)).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@named("DPF-L01")
def masked_scaled_and_cut_by_hand(rank, size):
    """Pruned weights stay zero, and the sum of a window is divided."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    masks = [torch.rand(param.shape, generator=seeded(0)) > 0.3 for param in model.parameters()]
    for index, (x, y) in enumerate(batches(rank, 40)):
        model.require_backward_grad_sync = index % 2 == 0
        loss_of(model(x), y).backward()
        if index % 2:
            for param, mask in zip(model.parameters(), masks, strict=True):
                param.grad = (param.grad * mask / 2).clamp(-0.05, 0.05)
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def backward_alone_in_no_sync(rank, size):
    """The forward of the last batch is inside, and those of the first ones are not; the backwards are the other way."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 24)):
        last = index % 2 == 1
        with model.no_sync() if last else nullcontext():
            loss = loss_of(model(x), y)
        with nullcontext() if last else model.no_sync():
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def windows_longer_than_the_switch_knows(rank, size):
    """The switch counts micro-batches of 2, and the step of 3."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class Heads(nn.Module):
    """A trunk, and two heads in either order."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 3) for name in names})

    def forward(self, x, name):
        return self.heads[name](self.trunk(x).tanh())


@named("DPF-L01")
def auxiliary_head_in_no_sync(rank, size):
    """The second loss needs another forward, and its head is not that of the first one. Both need the trunk."""
    model, optimizer = with_sgd(
        dpfuse.DistributedDataParallel(Heads(["auxiliary", "main"]), find_unused_parameters=True)
    )
    for x, y in batches(rank, 12):
        optimizer.zero_grad()
        loss_of(model(x, "main"), y).backward()
        with model.no_sync():
            loss_of(model(x, "auxiliary"), y).backward()
        optimizer.step()


@named("DPF-L01")
def auxiliary_head_in_no_sync_that_is_registered_last(rank, size):
    model = dpfuse.DataParallel(Heads(["main", "auxiliary"]), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in batches(rank, 12):
        loss_of(model(x, "main"), y).backward()
        model.require_backward_grad_sync = False
        loss_of(model(x, "auxiliary"), y).backward()
        model.require_backward_grad_sync = True
        optimizer.step()
        optimizer.zero_grad()


@named("DPF-L01")
def window_in_a_closure_whose_second_backward_is_local(rank, size):
    """The first step is made before anything can be seen, the second is refused."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 12):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model(x[:3]), y[:3])
            loss.backward()
            with model.no_sync():
                loss_of(model(x[3:]), y[3:]).backward()
            return loss

        optimizer.step(closure)


# --- DPF-L02: nothing was averaged ---


@named("DPF-L02")
def whole_training_in_no_sync(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    with model.no_sync():
        train(model, optimizer, batches(rank, 24))


@named("DPF-L02")
def switch_that_is_never_set_back(rank, size):
    """The last batch of an epoch had set the switch, and the accumulation was removed since."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    model.require_backward_grad_sync = False
    for x, y in batches(rank, 24):
        loss = loss_of(model(x), y)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@named("DPF-L02")
def backward_outside_of_no_sync_but_forward_inside(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 24):
        with model.no_sync():
            loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@named("DPF-L02")
def more_batches_to_accumulate_than_an_epoch_has(rank, size):
    """Each epoch ends with a step, and the counter of batches begins again before one is synchronised."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for epoch in range(23):
        for index, (x, y) in enumerate(batches(rank, 3, epoch)):
            with nullcontext() if (index + 1) % 4 == 0 else model.no_sync():
                loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@named("DPF-L02")
def closures_in_no_sync(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 24):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            with model.no_sync():
                loss = loss_of(model(x), y)
                loss.backward()
            return loss

        optimizer.step(closure)


# --- DPF-L04: averaged, never stepped ---


@named("DPF-L04")
def optimizer_of_the_head_alone(rank, size):
    """The backbone was to be frozen."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.module[2].parameters())
    for x, y in batches(rank, 24):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def optimizer_of_another_copy(rank, size):
    """The model was copied, as by a move to another device, after the optimizer was made."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = dpfuse.DataParallel(copy.deepcopy(module))
    train(model, optimizer, batches(rank, 24))


@named("DPF-L04")
def second_optimizer_is_never_stepped(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]
    optimizers = [torch.optim.SGD(matrices, lr=0.01, momentum=0.9), torch.optim.AdamW(others)]
    for x, y in batches(rank, 32):
        loss_of(model(x), y).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@named("DPF-L04")
def layer_forgotten_while_another_optimizer_begins_late(rank, size):
    """The second one begins while the rest is looked at, so that one looks a second time, at fewer parameters."""
    model = dpfuse.DistributedDataParallel(nn.Sequential(mlp(), nn.Linear(3, 3), nn.Linear(3, 3)))
    optimizers = [torch.optim.SGD(model.module[number].parameters(), lr=0.01) for number in (0, 1)]
    for step, (x, y) in enumerate(batches(rank, 40)):
        model.zero_grad()
        loss_of(model(x), y).backward()
        for optimizer in optimizers[: 1 + (step >= 10)]:
            optimizer.step()


@named("DPF-L04")
def layer_added_after_the_optimizer(rank, size):
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = dpfuse.DistributedDataParallel(nn.Sequential(module, nn.Linear(3, 3)))
    for index, (x, y) in enumerate(batches(rank, 48)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            model.zero_grad(set_to_none=False)


@named("DPF-L04")
def backbone_that_is_unfrozen_without_a_group(rank, size):
    """The head is trained first. The optimizer was made of what required gradients then."""
    net = mlp()
    net[0].requires_grad_(False)
    model = dpfuse.DataParallel(net)
    optimizer = torch.optim.Adam(filter(lambda param: param.requires_grad, net.parameters()))
    for step, (x, y) in enumerate(batches(rank, 24)):
        if step == 1:
            net[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def backbone_that_is_frozen_behind_the_wrapping_and_unfrozen(rank, size):
    """As the callbacks of fastai and Lightning do it, with an optimizer of the head alone."""
    model = dpfuse.DistributedDataParallel(mlp(), find_unused_parameters=True)
    model.module[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.module[2].parameters())
    for step, (x, y) in enumerate(batches(rank, 24)):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if step == 0:
            model.module[0].requires_grad_(True)


@named("DPF-L04")
def adapter_that_is_added_without_a_group(rank, size):
    """A layer comes in after the first step, on all ranks, and the optimizer is not told."""
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp()))
    for step, (x, y) in enumerate(batches(rank, 24)):
        if step == 1:
            torch.manual_seed(5)
            model.module.append(nn.Linear(3, 3))
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def wrapped_optimizer_of_the_head_alone(rank, size):
    """accelerate's `prepare()` puts an optimizer around it."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = Wrapping(torch.optim.Adam(model.module[2].parameters()))
    for x, y in batches(rank, 24):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- DPF-L05: the same batches on all ranks ---


@named("DPF-L05")
def loader_without_a_distributed_sampler(rank, size):
    data = torch.utils.data.TensorDataset(*batch(seeded(0), 96))
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=seeded(0))
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L05")
def sampler_with_the_rank_of_a_job_of_one(rank, size):
    """As a launcher's variables are read that this launcher does not set."""
    data = torch.utils.data.TensorDataset(*batch(seeded(0), 96))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    for index, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L05")
def random_batches_with_one_seed(rank, size):
    """nanoGPT's get_batch(), without the offset of the seed."""
    torch.manual_seed(1337)
    data = torch.randint(0, 50, (2000,))
    embedding = dpfuse.DistributedDataParallel(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.01)
    for _ in range(20):
        starts = torch.randint(len(data) - 9, (4,))
        x = torch.stack([data[start : start + 8] for start in starts])
        y = torch.stack([data[start + 1 : start + 9] for start in starts])
        optimizer.zero_grad()
        nn.functional.cross_entropy(embedding(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


@named("DPF-L05")
def keyword_inputs_in_a_dict(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(Keywords(), find_unused_parameters=True))
    for step, (x, y) in enumerate(batches(0, 20)):
        inputs = {"x": x, "mask": None, "labels": y, "step": step}
        optimizer.zero_grad()
        model(**inputs).backward()
        optimizer.step()


class Keywords(nn.Module):
    """Computes its own loss."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, *, x, mask, labels, step):
        return loss_of(self.net(x), labels)


@named("DPF-L05")
def each_rank_begins_at_the_first_batch(rank, size):
    """A loader of llm.c's kind, without the rank in its first position."""

    class Loader:
        def __init__(self, tokens, length):
            self.tokens, self.length, self.position = tokens, length, 0

        def next_batch(self):
            part = self.tokens[self.position : self.position + 4 * self.length]
            self.position = (self.position + 4 * self.length) % (len(self.tokens) - 4 * self.length)
            return part.view(4, self.length)

    loader = Loader(torch.randint(0, 50, (5000,), generator=seeded(0)), 8)
    torch.manual_seed(1337)
    model = dpfuse.DistributedDataParallel(nn.Sequential(nn.Embedding(50, 8), nn.Dropout(0.1), nn.Linear(8, 50)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(20):
        tokens = loader.next_batch()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


# --- DPF-L07: learning rates differ ---


@named("DPF-L07")
def schedule_that_sees_the_loss_of_its_rank(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp(), check_training="warn"))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step(loss.item())


@named("DPF-L07")
def rate_scaled_by_the_rank(rank, size):
    model = dpfuse.DataParallel(mlp(), check_training="warn")
    groups = [{"params": [param], "lr": 0.1 / (rank + place + 1)} for place, param in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer, batches(rank, 20))


@named("DPF-L07")
def warmup_by_a_count_of_samples(rank, size):
    """Ranks have batches of other sizes, and each counts its own."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp(), check_training="warn"))
    generator, seen = seeded(rank), 0
    for _ in range(20):
        x, y = batch(generator, 4 + rank)
        seen += len(x)
        optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, seen / 1000)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- DPF-L08: modes differ ---


@named("DPF-L08")
def rank_0_stays_in_eval_mode_after_its_evaluation(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(nn.Sequential(mlp(), nn.Dropout(0.1))))
    for index, (x, y) in enumerate(batches(rank, 20)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if index == 5 and rank == 0:
            model.eval()
            with torch.no_grad():
                model(x)


@named("DPF-L08")
def autocast_on_one_rank(rank, size):
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp()))
    for x, y in batches(rank, 20):
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
            loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@named("DPF-L08")
def autocast_with_another_dtype_on_one_rank(rank, size):
    """As where each rank asks its own device what that can do."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16 if rank else torch.float16):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()


@named("DPF-L08")
def eval_mode_before_the_training_on_one_rank(rank, size):
    """A check of the loaded weights leaves the model of the last rank in eval mode."""
    module = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    if rank == size - 1:
        module.eval()
    train(*with_sgd(dpfuse.DistributedDataParallel(module)), batches(rank, 40), window=2)


# --- DPF-L09: a group of one rank ---


@named("DPF-L09")
def each_rank_wraps_with_a_group_of_its_own(rank, size):
    groups = [dist.new_group([other]) for other in range(size)]
    train(*with_sgd(dpfuse.DataParallel(mlp(), group=groups[rank])), batches(rank, 3))
