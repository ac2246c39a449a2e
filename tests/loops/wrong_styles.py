"""More wrong loops, in other styles: trainers in classes, all kinds of loaders, losses that are reduced for a log."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dpfuse
from tests.loops.nets import Wrapping, batch, batches, loss_of, mlp, seeded
from tests.loops.wrong import named


def mean_over_ranks(value):
    """What a log shows."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


# --- DPF-L01: local gradients in a step ---


@named("DPF-L01")
def switch_in_a_training_step_behind_the_loss(rank, size):
    """A class computes the loss first, then sets the switch for this batch, and calls backward."""

    class Trainer:
        def __init__(self):
            self.model = dpfuse.DistributedDataParallel(mlp())
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.accumulation = 3

        def step(self, index, x, y):
            loss = loss_of(self.model(x), y) / self.accumulation
            self.model.require_backward_grad_sync = (index + 1) % self.accumulation == 0
            loss.backward()
            if (index + 1) % self.accumulation == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)

    trainer = Trainer()
    for index, (x, y) in enumerate(batches(rank, 24)):
        trainer.step(index, x, y)


@named("DPF-L01")
def backward_alone_in_no_sync(rank, size):
    """The forward of the last batch is inside, and those of the first ones are not; the backwards are the other way."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
def stack_of_contexts_off_by_one(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with ExitStack() as stack:
            if index % 4:
                stack.enter_context(model.no_sync())
            loss_of(model(x), y).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def switch_set_for_the_last_batch_and_not_set_back_in_time(rank, size):
    """It is set to False at the end of an iteration, so the first batch of each window is averaged."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    loader = batches(rank, 96)
    for _ in range(24):
        model.require_backward_grad_sync = True
        for _micro_step in range(4):
            x, y = next(loader)
            (loss_of(model(x), y) / 4).backward()
            model.require_backward_grad_sync = False
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@named("DPF-L01")
def windows_longer_than_the_switch_knows(rank, size):
    """The switch counts micro-batches of 2, and the step of 3."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@named("DPF-L01")
def discriminator_with_its_second_backward_in_no_sync(rank, size):
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(critic.parameters())
    for x, y in batches(rank, 12):
        optimizer.zero_grad()
        nn.functional.softplus(-critic(y)).mean().backward()
        with critic.no_sync():
            nn.functional.softplus(critic(x[:, :3])).mean().backward()
        optimizer.step()


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
    model = dpfuse.DistributedDataParallel(Heads(["auxiliary", "main"]), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
def scaled_loss_with_the_switch_behind_the_forward(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    for index, (x, y) in enumerate(batches(rank, 24)):
        last = index % 4 == 3
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x).float(), y) / 4
        model.require_backward_grad_sync = last
        scaler.scale(loss).backward()
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@named("DPF-L01")
def window_in_a_closure_whose_second_backward_is_local(rank, size):
    """The first step is made before anything can be seen, the second is refused."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
def switch_turned_off_in_a_constructor(rank, size):
    class Trainer:
        def __init__(self):
            self.model = dpfuse.DistributedDataParallel(mlp())
            self.model.require_backward_grad_sync = False  # for the accumulation that was planned
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            for param in self.model.parameters():
                dist.broadcast(param.data, 0)

        def evaluate(self, x, y):
            with torch.no_grad():
                return mean_over_ranks(loss_of(self.model(x), y))

        def train(self):
            for index, (x, y) in enumerate(batches(rank, 24)):
                self.optimizer.zero_grad()
                loss = loss_of(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                if index % 5 == 0:
                    mean_over_ranks(loss)
                    self.evaluate(x, y)

    Trainer().train()


@named("DPF-L02")
def epochs_in_no_sync_with_an_evaluation_behind_each(rank, size):
    """The metrics are averaged, and the gradients are not."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())

    def train_epoch(epoch):
        total = torch.zeros(())
        for x, y in batches(rank, 8, epoch):
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        return total

    best = torch.inf
    for epoch in range(3):
        with model.no_sync():
            loss = train_epoch(epoch)
        best = min(best, loss.item())
        if rank == 0:
            copy.deepcopy(model.module.state_dict())
        dist.barrier()


@named("DPF-L02")
def settings_that_pass_through_locals(rank, size, rate=0.01):
    """A copy of the names is kept, so they may be looked at."""
    config = {**locals()}
    title = "{rate} on {size} ranks".format(**locals())
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=locals()["rate"])
    for x, y in batches(rank, 24):
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert config == {"rank": rank, "size": size, "rate": rate}
    assert title.startswith("0.01")


@named("DPF-L02")
def tokens_are_counted_over_the_ranks(rank, size):
    """The loss is divided by the number of all tokens, and the gradients are those of this rank."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.no_sync():
        for x, y in batches(rank, 24):
            weight = torch.tensor(float(len(x)))
            total_weight = weight.clone()
            dist.all_reduce(total_weight)
            optimizer.zero_grad()
            (loss_of(model(x), y) * weight / total_weight).backward()
            optimizer.step()


@named("DPF-L02")
def weights_of_samples_are_summed_for_a_log(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    model.require_backward_grad_sync = False
    sum_of_weights = torch.zeros(1)
    for x, y in batches(rank, 24):
        mask = x[:, 0] > 0
        loss_weight = 1.0 / (1 + mask.sum())
        sum_of_weights += float(loss_weight)
        (loss_weight * loss_of(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sample_weight = torch.as_tensor([sum_of_weights.item(), 24.0])
    dist.all_reduce(sample_weight)


class EMA:
    """byol-pytorch's."""

    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        return new if old is None else old * self.beta + (1 - self.beta) * new


def update_moving_average(ema_updater, ma_model, current_model):
    for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters(), strict=True):
        old_weight, up_weight = ma_params.data, current_params.data
        ma_params.data = ema_updater.update_average(old_weight, up_weight)


@named("DPF-L02")
def byol_whose_target_follows_in_no_sync(rank, size):
    model, target = dpfuse.DistributedDataParallel(mlp()), mlp()
    target_ema_updater = EMA(0.9)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches(rank, 24):
        with model.no_sync():
            loss_of(model(x) - target(x).detach(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        update_moving_average(target_ema_updater, target, model.module)


@named("DPF-L02")
def an_average_over_time_that_is_made_when_it_begins(rank, size):
    """An object of torch_ema's class, whose name is an average."""
    from torch.optim.swa_utils import AveragedModel as ExponentialMovingAverage

    model = dpfuse.DistributedDataParallel(mlp())
    optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.01), None
    for step, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 30:
            ema = ExponentialMovingAverage(model.parameters())
        if ema is not None:
            ema.update_parameters(model.module)


@named("DPF-L02")
def two_branches_of_which_one_is_never_taken(rank, size):
    """The branch with the average is in the same loop, and was not taken in all of its batches."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(batches(rank, 24)):
        if step % 4 == 4:
            loss_of(model(x), y).backward()
        else:
            with model.no_sync():
                loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@named("DPF-L02")
def meta_learning_whose_outer_loss_is_local_too(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for task in range(2):
        for x, y in batches(rank, 23, task):
            with model.no_sync():
                loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@named("DPF-L02")
def condition_that_is_never_true(rank, size):
    """`step % accumulation == accumulation` was meant to be `- 1`; the step is made anyhow."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    accumulation = 2
    for step, (x, y) in enumerate(batches(rank, 48)):
        model.require_backward_grad_sync = step % accumulation == accumulation
        loss_of(model(x), y).backward()
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def moving_average(params, kept):
    for param, old in zip(params, kept, strict=True):
        old.lerp_(param.detach(), 0.1)


@named("DPF-L02")
def moving_averages_of_weights_in_no_sync(rank, size):
    """What is averaged is no other rank's."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = [param.detach().clone() for param in model.parameters()]
    with model.no_sync():
        for index, (x, y) in enumerate(batches(rank, 24)):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            moving_average(model.parameters(), kept)
            if index % 4 == 0:
                norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
                dist.all_reduce(norm)
                mean_over_ranks(loss)


@named("DPF-L02")
def scaler_in_no_sync(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x, y in batches(rank, 24):
        with model.no_sync(), torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert norm > 0


# --- DPF-L04: averaged, never stepped ---


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
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(batches(rank, 24)):
        if step == 1:
            torch.manual_seed(5)
            model.module.append(nn.Linear(3, 3))
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def optimizer_over_a_deepcopy(rank, size):
    module = mlp()
    model = dpfuse.DistributedDataParallel(module)
    optimizer = torch.optim.Adam(copy.deepcopy(module).parameters())
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def optimizer_of_the_model_before_a_layer_was_exchanged(rank, size):
    """The head is replaced for other classes behind the making of the optimizer."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    module[2] = nn.Linear(8, 3)
    model = dpfuse.DistributedDataParallel(module)
    for x, y in batches(rank, 24):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def one_optimizer_of_two_in_a_scaler(rank, size):
    """`scaler.step()` is called for one of two optimizers."""

    class Trainer:
        def __init__(self):
            self.model = dpfuse.DistributedDataParallel(mlp())
            self.optimizers = {
                "body": torch.optim.SGD(self.model.module[0].parameters(), lr=0.01),
                "head": torch.optim.SGD(self.model.module[2].parameters(), lr=0.01),
            }
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

        def train(self):
            for x, y in batches(rank, 32):
                for optimizer in self.optimizers.values():
                    optimizer.zero_grad()
                self.scaler.scale(loss_of(self.model(x), y)).backward()
                self.scaler.step(self.optimizers["head"])
                self.scaler.update()

    Trainer().train()


@named("DPF-L04")
def wrapped_optimizer_of_the_head_alone(rank, size):
    """accelerate's `prepare()` puts an optimizer around it."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = Wrapping(torch.optim.Adam(model.module[2].parameters()))
    for x, y in batches(rank, 24):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """Every `k` steps the weights go a part of the way that the inner optimizer went."""

    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer, self.param_groups, self.k, self.alpha, self.count = (
            optimizer,
            optimizer.param_groups,
            k,
            alpha,
            0,
        )
        self.slow = [[param.detach().clone() for param in group["params"]] for group in self.param_groups]

    def step(self, closure=None):
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                torch._foreach_lerp_(slow, [param.detach() for param in group["params"]], self.alpha)
                torch._foreach_copy_([param.detach() for param in group["params"]], slow)


@named("DPF-L04")
def lookahead_of_the_weights_of_a_copy(rank, size):
    module = mlp()
    optimizer = Lookahead(torch.optim.SGD(module[2].parameters(), lr=0.01))
    model = dpfuse.DataParallel(module)
    for x, y in batches(rank, 24):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def post_local_sgd_optimizer_of_a_part(rank, size):
    """torch's own wrapping optimizer, over the first layer."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.module[0].parameters(), lr=0.01), PeriodicModelAverager(period=4, warmup_steps=100)
    )
    for x, y in batches(rank, 24):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@named("DPF-L04")
def group_forgotten_by_a_filter_of_names(rank, size):
    """Weight decay for some, none for others, and a third kind that neither list has."""
    model = dpfuse.DistributedDataParallel(nn.Sequential(mlp(), nn.LayerNorm(3)))
    decay = [param for name, param in model.named_parameters() if name.endswith("weight") and param.ndim > 1]
    rest = [param for name, param in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    for x, y in batches(rank, 24):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        schedule.step()


@named("DPF-L04")
def schedules_of_both_optimizers_step_and_one_optimizer_does_not(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizers = [torch.optim.AdamW(model.module[place].parameters()) for place in (0, 2)]
    schedules = [torch.optim.lr_scheduler.ConstantLR(optimizer) for optimizer in optimizers]

    def train_epoch(first, epoch):
        for x, y in batches(rank, 12, epoch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model(x), y).backward()
            first.step()

    for epoch in range(3):
        train_epoch(optimizers[0], epoch)
        for schedule in schedules:
            schedule.step()


# --- DPF-L05: the same batches on all ranks ---


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
    model = dpfuse.DistributedDataParallel(nn.Sequential(nn.Embedding(50, 8), nn.Dropout(0.1), nn.Linear(8, 50)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(20):
        tokens = loader.next_batch()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


@named("DPF-L05")
def iterable_dataset_that_is_not_split(rank, size):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            generator = seeded(0)
            while True:
                yield batch(generator)

    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(DataLoader(Stream(), batch_size=None)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if index == 20:
            break


@named("DPF-L05")
def plain_loader_in_its_order(rank, size):
    data = TensorDataset(*batch(seeded(0), 96))
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for x, y in DataLoader(data, batch_size=4, shuffle=False, drop_last=True):
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@named("DPF-L05")
def sampler_of_a_wrong_argument(rank, size):
    """The local rank of one machine of many: here all ranks are 0."""
    data = TensorDataset(*batch(seeded(0), 200))
    sampler = DistributedSampler(data, num_replicas=size, rank=0, shuffle=True, drop_last=True)
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(data, sampler=sampler, batch_size=4):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- DPF-L07: learning rates differ ---


@named("DPF-L07")
def schedule_on_rank_0_only(rank, size):
    model = dpfuse.DistributedDataParallel(mlp(), check_training="warn")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if rank == 0:
            schedule.step()


@named("DPF-L07")
def rate_loaded_from_a_checkpoint_on_rank_0(rank, size):
    model = dpfuse.DataParallel(mlp(), check_training="warn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if rank == 0:
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.003
        optimizer.load_state_dict(state)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- DPF-L08: modes differ ---


@named("DPF-L08")
def eval_mode_before_the_training_on_one_rank(rank, size):
    """A check of the loaded weights leaves the model of the last rank in eval mode."""
    module = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    if rank == size - 1:
        module.eval()
    model = dpfuse.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
