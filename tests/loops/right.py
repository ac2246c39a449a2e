"""Training loops that are right, though a careless check could take them for wrong. None of them gets a message."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.loops.nets import batch, batches, loss_of, mlp, seeded

__all__ = ["PROGRAMS"]

Loop = Callable[[int, int], None]  # gets rank and number of ranks
PROGRAMS: dict[str, Loop] = {}


def quiet(program: Loop) -> Loop:
    """Add a program that gets no message."""
    PROGRAMS[program.__name__] = program
    return program


# --- Accumulation ---


@quiet
def plain(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 30):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def nanogpt(rank, size):
    """The switch is set before the forward."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    loader = batches(rank, 96)
    for _ in range(24):
        for micro_step in range(4):
            model.require_backward_grad_sync = micro_step == 3
            x, y = next(loader)
            (loss_of(model(x), y) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@quiet
def no_sync_with_zeros_kept(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for index, (x, y) in enumerate(batches(rank, 60)):
        with model.no_sync(enabled=(index + 1) % 3 != 0):
            loss_of(model(x), y).backward()
        if (index + 1) % 3 == 0:
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@quiet
def two_backwards_that_both_synchronise(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        outputs = model(x)
        loss_of(outputs, y).backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()


@quiet
def in_buckets(rank, size):
    model = dpfuse.DataParallel(mlp(), accumulate_in_buckets=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            model.zero_grad()


@quiet
def scaler_that_skips_steps(rank, size):
    """A loss of infinity in window 3: the scaler skips that step, on all ranks."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            loss = loss_of(model(x), y) * (torch.inf if index == 7 else 1)
            scaler.scale(loss).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=index % 3 == 0)


# --- Local backwards on purpose ---


@quiet
def gradients_read_for_a_log(rank, size):
    """A local backward between steps shows what this rank's gradient is."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(batches(rank, 20)):
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.zero_grad(set_to_none=number % 2 == 0)


@quiet
def penalty_in_no_sync_outside_the_wrapper(rank, size):
    """It is the same on each rank."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        with model.no_sync():
            (0.01 * sum(param.square().sum() for param in model.parameters())).backward()
        optimizer.step()


@quiet
def penalty_in_no_sync_before(rank, size):
    """R1 of a discriminator: the penalty is averaged with the loss behind it."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        with model.no_sync():
            inputs = x.requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            slope.square().sum().backward()
        loss_of(model(x.detach()), y).backward()
        optimizer.step()


@quiet
def gan_whose_generator_step_writes_the_discriminator(rank, size):
    generator = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    for number, (x, y) in enumerate(batches(rank, 20)):
        critic.zero_grad(set_to_none=number % 2 == 0)
        critic(y).mean().backward()
        (-critic(generator(x).detach()).mean()).backward()
        of_critic.step()
        generator.zero_grad()
        with critic.no_sync():
            critic(generator(x)).mean().backward()
        of_generator.step()


@quiet
def dcgan_with_one_backward_of_the_critic_in_no_sync(rank, size):
    generator = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    for x, y in batches(rank, 20):
        critic.zero_grad()
        with critic.no_sync():
            critic(y).mean().backward()
        (-critic(generator(x).detach()).mean()).backward()
        of_critic.step()
        generator.zero_grad()
        critic(generator(x)).mean().backward()
        of_generator.step()


@quiet
def sam_of_each_rank(rank, size):
    """Sharpness-aware minimisation: the first backward is local and zeroed, the second is averaged."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        with model.no_sync():
            loss_of(model(x), y).backward()
        with torch.no_grad():
            kept = [param.clone() for param in model.parameters()]
            for param in model.parameters():
                param += 0.01 * param.grad / (param.grad.norm() + 1e-12)
        model.zero_grad()
        loss_of(model(x), y).backward()
        with torch.no_grad():
            for param, old in zip(model.parameters(), kept, strict=True):
                param.copy_(old)
        optimizer.step()
        optimizer.zero_grad()


@quiet
def average_by_hand_after_a_mixed_window(rank, size):
    """The first forward was outside of no_sync(), but the gradients of all are averaged by hand in the end."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 1):
            loss_of(model(x), y).backward()
        if index % 2:
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= size
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@quiet
def fused_average_by_hand_after_a_mixed_window(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 1):
            loss_of(model(x), y).backward()
        if index % 2:
            dpfuse.fused_allreduce_gradients(model.parameters())
            optimizer.step()
            optimizer.zero_grad()


@quiet
def lbfgs(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for number, (x, y) in enumerate(batches(rank, 6)):

        def closure(x=x, y=y, number=number):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@quiet
def optimizers_of_different_cadence(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    often = torch.optim.SGD(model.module[0].parameters(), lr=0.01)
    seldom = torch.optim.SGD(model.module[2].parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        loss_of(model(x), y).backward()
        often.step()
        often.zero_grad()
        if index % 4 == 3:
            seldom.step()
            seldom.zero_grad()


@quiet
def fisher_information(rank, size):
    """Backwards for their gradients alone, with no step at all."""
    model = dpfuse.DistributedDataParallel(mlp())
    fisher = [torch.zeros_like(param) for param in model.parameters()]
    for x, y in batches(rank, 30):
        model.zero_grad()
        loss_of(model(x), y).backward()
        for total, param in zip(fisher, model.parameters(), strict=True):
            total += param.grad.square()


@quiet
def an_exception_in_a_window(rank, size):
    """Every rank drops the window in which a backward has raised."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def broken(_grad):
        raise ValueError("a broken batch")

    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            outputs = model(x)
            if index == 10:
                outputs.register_hook(broken)
            try:
                loss_of(outputs, y).backward()
            except ValueError:
                optimizer.zero_grad()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def ema_and_evaluation(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    average = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, param in zip(average.parameters(), model.module.parameters(), strict=True):
                kept.lerp_(param, 0.1)
        with torch.no_grad():
            model(x)
        average(x)


@quiet
def one_batch_overfitted_on_purpose(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batch(seeded(0))
    for _ in range(24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- The ranks train apart, or average by themselves ---


def by_hand(model, size):
    """Average the gradients as programs did before there was DDP."""
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= size


@quiet
def average_by_hand(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.no_sync():
        for x, y in batches(rank, 30):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            by_hand(model, size)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


@quiet
def average_by_hand_in_one_flat_tensor(rank, size):
    model = dpfuse.DataParallel(mlp(), gradient_scale=1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in batches(rank, 30):
        with model.no_sync():
            (loss_of(model(x), y) / size).backward()
        grads = [param.grad for param in model.parameters()]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.data.copy_(part.view_as(grad))
        optimizer.step()
        optimizer.zero_grad()


@quiet
def fused_average_by_hand(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 30):
        optimizer.zero_grad(set_to_none=False)
        with model.no_sync():
            loss_of(model(x), y).backward()
        dpfuse.fused_allreduce_gradients(model.parameters())
        optimizer.step()


@quiet
def average_in_hooks_of_the_parameters(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def average(grad):
        grad = grad / size
        dist.all_reduce(grad)
        return grad

    for param in model.parameters():
        param.register_hook(average)
    with model.no_sync():
        for x, y in batches(rank, 30):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


@quiet
def local_sgd_by_hand(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 30)):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        if index % 6 == 5:
            for param in model.parameters():
                dist.all_reduce(param.data)
                param.data /= size


@quiet
def local_steps_between_averaged_ones(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 1):
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 4 < 2)
        if index % 2:
            for param in model.parameters():
                dist.all_reduce(param.data)
                param.data /= size


@quiet
def post_local_sgd_of_torch(rank, size):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = dpfuse.DistributedDataParallel(mlp())
    for period in (4, 100):
        averager = PeriodicModelAverager(period=period, warmup_steps=2)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), averager)
        for index, (x, y) in enumerate(batches(rank, 30)):
            optimizer.zero_grad()
            with model.no_sync(enabled=index >= 2):
                loss_of(model(x), y).backward()
            optimizer.step()


@quiet
def some_local_steps_before_the_first_average(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 30)):
        optimizer.zero_grad()
        with model.no_sync(enabled=index % 16 != 15):
            loss_of(model(x), y).backward()
        optimizer.step()


# --- Windows of other lengths ---


@quiet
def last_batches_of_an_epoch_are_averaged(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for index, (x, y) in enumerate(batches(rank, 19, epoch)):
            last = (index + 1) % 2 == 0 or index == 18
            with model.no_sync(enabled=not last):
                loss_of(model(x), y).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()


@quiet
def last_batches_of_an_epoch_are_averaged_by_hand(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for index, (x, y) in enumerate(batches(rank, 26, epoch)):
            with model.no_sync(enabled=(index + 1) % 3 != 0):
                loss_of(model(x), y).backward()
            if index == 25:
                dpfuse.fused_allreduce_gradients(model.parameters())
            if (index + 1) % 3 == 0 or index == 25:
                optimizer.step()
                optimizer.zero_grad()


@quiet
def a_window_that_is_dropped_once(rank, size):
    """All ranks have agreed that its loss is no number."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 60)):
        last = index % 3 == 2
        with model.no_sync(enabled=not last):
            loss = loss_of(model(x), y)
        if index == 37:
            optimizer.zero_grad()
            continue
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def longer_windows_later(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = batches(rank, 200)
    for length in [4] * 10 + [2] * 10 + [8] * 4:
        for index in range(length):
            x, y = next(loader)
            with model.no_sync(enabled=index + 1 < length):
                loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@quiet
def norms_of_single_batches_for_a_log(rank, size):
    """Every few steps a batch has a backward of its own, whose gradient is read and zeroed."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 60)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
            if index % 4 == 3:
                with model.no_sync():
                    loss_of(model(x), y).backward()
                optimizer.zero_grad()


@quiet
def norms_of_single_batches_every_five_windows(rank, size):
    """The same, so seldom that it could be an epoch: its backward has a line of its own."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 60)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
            if index % 10 == 9:
                with model.no_sync():
                    loss_of(model(x), y).backward()
                optimizer.zero_grad()


@quiet
def gradient_noise_scale_with_the_backward_of_training(rank, size):
    """Every six windows a callback measures one batch, averaged, with the function that the training calls."""

    class Trainer:
        def __init__(self):
            self.model = dpfuse.DistributedDataParallel(mlp())
            self.optimizer = torch.optim.AdamW(self.model.parameters())

        def backward(self, x, y, sync):
            with self.model.no_sync(enabled=not sync):
                loss_of(self.model(x), y).backward()

        def step(self, number, micro_batches):
            for place, (x, y) in enumerate(micro_batches):
                self.backward(x, y, place == len(micro_batches) - 1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if number % 6 == 5:
                self.on_log(*micro_batches[0])

        def on_log(self, x, y):
            self.backward(x, y, True)
            torch.stack([param.grad.norm() for param in self.model.parameters()]).norm()
            self.optimizer.zero_grad(set_to_none=False)

    trainer, loader = Trainer(), batches(rank, 90)
    for number in range(30):
        trainer.step(number, [next(loader) for _ in range(3)])


@quiet
def saliency_of_one_forward_every_four_windows(rank, size):
    """The logged gradient is that of one output of a forward whose loss is trained on, too."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for index, (x, y) in enumerate(batches(rank, 64)):
        model.require_backward_grad_sync = index % 2 == 1
        outputs = model(x)
        if index % 8 == 0:
            outputs[0, 0].backward(retain_graph=True)
            optimizer.zero_grad()
        loss_of(outputs, y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


# --- Models that are converted ---


@quiet
def bfloat16_after_the_first_backward(rank, size):
    """The first batch was to find out what memory is needed."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    model.bfloat16()
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x.bfloat16()), y.bfloat16()).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def float64_in_the_middle_of_a_window(rank, size):
    """A run that shows no progress is continued with more bits, gradients included."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        dtype = next(model.parameters()).dtype
        model.require_backward_grad_sync = index % 3 == 2
        loss_of(model(x.to(dtype)), y.to(dtype)).backward()
        if index == 10:
            model.double()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@quiet
def local_steps_that_are_averaged_in_bfloat16_from_then_on(rank, size):
    """Local SGD converts the model while nothing but its own averages has been seen."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.no_sync():
        for index, (x, y) in enumerate(batches(rank, 40)):
            dtype = next(model.parameters()).dtype
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(x.to(dtype)), y.to(dtype)).backward()
            optimizer.step()
            if index == 8:
                model.bfloat16()
            if index % 4 == 3:
                for param in model.parameters():
                    dist.all_reduce(param.data)
                    param.data /= size


# --- Gradients that are changed on purpose ---


class Towers(nn.Module):
    """Two networks with one wrapper, of which each loss needs one."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(), mlp()

    def forward(self, name, x):
        return getattr(self, name)(x)


@quiet
def actor_and_critic_that_are_clipped_behind_their_own_backwards(rank, size):
    """The second backward is not of the gradients that were clipped before it."""
    model = dpfuse.DistributedDataParallel(Towers(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches(rank, 16):
        optimizer.zero_grad()
        for name in ("critic", "actor"):
            loss_of(model(name, x), y).backward()
            nn.utils.clip_grad_norm_(getattr(model.module, name).parameters(), 0.05)
        optimizer.step()


@quiet
def gan_that_clips_its_discriminator_before_the_generators_loss(rank, size):
    """The loss of the generator goes through the frozen discriminator, and both step at the end."""
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    generator = dpfuse.DistributedDataParallel(mlp())
    optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, generator)]
    for x, y in batches(rank, 16):
        for optimizer in optimizers:
            optimizer.zero_grad()
        fake = generator(x)
        nn.functional.softplus(torch.cat([-critic(y), critic(fake.detach())])).mean().backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.05)
        critic.requires_grad_(False)
        nn.functional.softplus(-critic(fake)).mean().backward()
        critic.requires_grad_(True)
        nn.utils.clip_grad_norm_(generator.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()


@quiet
def noise_of_each_rank(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = seeded(rank, 5)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x + torch.randn(x.shape, generator=generator)), y).backward()
        if index % 2:
            for param in model.parameters():
                param.grad += 0.01
            optimizer.step()
            optimizer.zero_grad()


@quiet
def weights_kept_for_a_longer_memory(rank, size):
    """Momentum by hand: gradients are not zeroed, but shrunk after each step."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        loss_of(model(x), y).backward()
        optimizer.step()
        torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)


# --- Weights that no optimizer has, and that change all the same, or need not ---


@quiet
def copies_in_float32(rank, size):
    model = dpfuse.DistributedDataParallel(mlp().bfloat16())
    masters = [param.detach().float().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-7)
    for x, y in batches(rank, 30):
        model.zero_grad()
        loss_of(model(x.bfloat16()), y).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)


@quiet
def updates_by_hand(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    other = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([other], lr=0.01)
    for x, y in batches(rank, 30):
        model.zero_grad()
        loss_of(model(x), y).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.01 * param.grad
        other.grad = torch.ones(3)
        optimizer.step()


@quiet
def frozen_backbone(rank, size):
    module = mlp()
    module[0].requires_grad_(False)
    model = dpfuse.DistributedDataParallel(module)
    optimizer = torch.optim.SGD((param for param in model.parameters() if param.requires_grad), lr=0.01)
    for x, y in batches(rank, 30):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def backbone_frozen_after_wrapping_and_back(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 30)):
        model.module[0].requires_grad_(not 5 <= index < 20)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def learning_rate_of_zero_at_first(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step < 25 else 1.0)
    for x, y in batches(rank, 30):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        schedule.step()


@quiet
def parts_without_gradient(rank, size):
    """A loss that does not need a layer gives it zeros, and no optimizer has it."""
    module = mlp()
    module.extra = nn.Linear(4, 3)
    model = dpfuse.DataParallel(With(module))
    optimizer = torch.optim.SGD([param for name, param in model.named_parameters() if "extra" not in name], lr=0.01)
    for x, y in batches(rank, 30):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


class With(nn.Module):
    """Adds a layer's outputs, times 0."""

    def __init__(self, module):
        super().__init__()
        self.extra = module.extra
        del module.extra
        self.module = module

    def forward(self, x):
        return self.module(x) + 0 * self.extra(x)


@quiet
def sharded_optimizer(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    for index, (x, y) in enumerate(batches(rank, 50)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def steps_in_backward(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, step_in_backward=True)
    for x, y in batches(rank, 26):
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@quiet
def optimizers_in_backward_of_torch(rank, size):
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.01})
    model = dpfuse.DistributedDataParallel(module)
    for x, y in batches(rank, 26):
        loss_of(model(x), y).backward()


@quiet
def zero_redundancy_optimizer(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    for x, y in batches(rank, 26):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def two_phases_with_an_optimizer_each(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    for layer in (model.module[0], model.module[2]):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for other in (model.module[0], model.module[2]):
            other.requires_grad_(other is layer)
        for x, y in batches(rank, 26):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


# --- Inputs, rates and modes ---


@quiet
def schedule_value_as_the_first_input(rank, size):
    model = dpfuse.DistributedDataParallel(Timed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(batches(rank, 20)):
        optimizer.zero_grad()
        loss_of(model(torch.tensor(step / 20), x), y).backward()
        optimizer.step()


class Timed(nn.Module):
    """Knows how far the training is."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, time, x):
        return self.net(x) * (1 + time)


@quiet
def images_with_a_black_border_and_a_time(rank, size):
    """The first rows of each image are the same on all ranks."""
    model = dpfuse.DistributedDataParallel(Timed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = seeded(rank)
    for step in range(20):
        images = torch.zeros(200, 4)
        images[150:] = torch.randn(50, 4, generator=generator)
        optimizer.zero_grad()
        model(torch.tensor(step / 20), images).square().mean().backward()
        optimizer.step()


@quiet
def data_that_is_no_tensor(rank, size):
    """The batch lies in an object, beside the numbers of its rows, which are the same on all ranks."""
    model = dpfuse.DistributedDataParallel(OfObjects())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(batches(rank, 20)):
        optimizer.zero_grad()
        loss_of(model(torch.arange(5) + step, Rows(x)), y).backward()
        optimizer.step()


class Rows:
    """A batch of some other library."""

    def __init__(self, x):
        self.x = x


class OfObjects(nn.Module):
    """Takes rows, and their numbers."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, numbers, rows):
        return self.net(rows.x) + numbers[:, None] * 0.01


@quiet
def gan_with_the_same_noise_on_all_ranks(rank, size):
    generator = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    torch.manual_seed(999)
    for _, y in batches(rank, 24):
        noise = torch.randn(5, 4)
        critic.zero_grad()
        critic(y).mean().backward()
        (-critic(generator(noise).detach()).mean()).backward()
        of_critic.step()
        generator.zero_grad()
        critic(generator(noise)).mean().backward()
        of_generator.step()


@quiet
def distributed_sampler_without_shuffling(rank, size):
    data = torch.utils.data.TensorDataset(*batch(seeded(0), 192))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False)
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def integers_of_a_language_model(rank, size):
    torch.manual_seed(1337)
    data = torch.randint(0, 50, (2000,))
    torch.manual_seed(1337 + rank)
    model = dpfuse.DistributedDataParallel(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        starts = torch.randint(len(data) - 9, (4,))
        x = torch.stack([data[start : start + 8] for start in starts])
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@quiet
def schedule_of_each_group(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW([{"params": [param]} for param in model.parameters()], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        schedule.step()


@quiet
def rate_in_a_tensor(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01))
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def each_rank_steps_on_its_own_part(rank, size):
    """By hand what ZeRO does: the optimizer of a rank owns a part, and weights are sent from their owner."""
    model = dpfuse.DistributedDataParallel(mlp())
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params[rank::size], lr=0.01 * (1 + rank))
    for x, y in batches(rank, 26):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        for place, param in enumerate(params):
            dist.broadcast(param.data, place % size)


@quiet
def evaluation_on_rank_0_between_steps(rank, size):
    model = dpfuse.DistributedDataParallel(nn.Sequential(mlp(), nn.Dropout(0.1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 20):
        if rank == 0:
            model.eval()
            model(x)
            model.train()
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def autocast_on_all_ranks(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 20)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()


@quiet
def uneven_inputs_with_join(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for x, y in batches(rank, 12 + 6 * rank):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


# --- Ways to compute ---


@quiet
def checkpointing(rank, size):
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model = dpfuse.DistributedDataParallel(Checkpointed(checkpoint, reentrant))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for index, (x, y) in enumerate(batches(rank, 20)):
            with model.no_sync(enabled=index % 2 == 0):
                loss_of(model(x.requires_grad_()), y).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()


class Checkpointed(nn.Module):
    """Computes its layers again in backward."""

    def __init__(self, checkpoint, reentrant):
        super().__init__()
        self.net = mlp()
        self._checkpoint = checkpoint
        self._reentrant = reentrant

    def forward(self, x):
        return self._checkpoint(self.net, x, use_reentrant=self._reentrant)


@quiet
def bptt(rank, size):
    model = dpfuse.DistributedDataParallel(nn.RNN(4, 3, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = torch.zeros(1, 5, 3)
    for x, y in batches(rank, 24):
        outputs, state = model(x[:, None], state.detach())
        optimizer.zero_grad()
        loss_of(outputs[:, 0], y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@quiet
def parameters_that_are_not_always_used(rank, size):
    model = dpfuse.DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x, index % 3), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


class Branches(nn.Module):
    """Uses one of three layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])

    def forward(self, x, branch):
        return self.layers[branch](x)


@quiet
def sparse_embedding(rank, size):
    model = dpfuse.DistributedDataParallel(nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = seeded(rank)
    for index in range(40):
        with model.no_sync(enabled=index % 2 == 0):
            model(torch.randint(0, 50, (5,), generator=generator)).square().mean().backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def one_decoder_in_two_wrappers(rank, size):
    """The backward of one wrapper adds to gradients between two backwards of the other one."""
    decoder, first, second = mlp(), nn.Linear(4, 4), nn.Linear(4, 4)
    models = [dpfuse.DistributedDataParallel(nn.Sequential(own, decoder)) for own in (first, second)]
    params = [*first.parameters(), *second.parameters(), *decoder.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 40)):
        for model in models:
            with model.no_sync(enabled=index % 2 == 0):
                loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def meta_learning(rank, size):
    """Steps of an inner loop, on copies of the weights."""
    from torch.func import functional_call

    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        params = dict(model.module.named_parameters())
        for _ in range(2):
            loss = loss_of(functional_call(model.module, params, (x,)), y)
            grads = torch.autograd.grad(loss, [*params.values()], create_graph=True)
            params = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
        loss_of(functional_call(model, {f"module.{name}": param for name, param in params.items()}, (x,)), y).backward()
        optimizer.step()


@quiet
def ppo(rank, size):
    """Several epochs over the same rollout, with a shuffled part of it in each step."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    generator = seeded(rank)
    for _ in range(3):
        with torch.no_grad():
            x, y = batch(generator, 16)
            old = model(x)
        for _ in range(4):
            for rows in torch.randperm(16, generator=generator).split(8):
                optimizer.zero_grad()
                (loss_of(model(x[rows]), y[rows]) + loss_of(model(x[rows]), old[rows])).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()


@quiet
def gradients_of_other_ranks_are_weighed(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = seeded(rank)
    for index in range(24):
        x, y = batch(generator, 3 + (index + rank) % 4)
        model.set_gradient_weight(len(x))
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def a_communication_hook(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = dpfuse.DistributedDataParallel(mlp())
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 48)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def sixteen_bits_on_the_wire(rank, size):
    model = dpfuse.DataParallel(mlp(), wire_dtype=torch.bfloat16, error_feedback=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def deterministic_sums(rank, size):
    model = dpfuse.DataParallel(mlp(), deterministic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def optimizer_that_averages_in_its_step(rank, size):
    """As Horovod's does."""

    class Averaging(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    dist.all_reduce(param.grad)
                    param.grad /= size
            return super().step(closure)

    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = Averaging(model.parameters(), lr=0.01)
    with model.no_sync():
        for x, y in batches(rank, 30):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


@quiet
def schedule_under_join(rank, size):
    """A rank without inputs makes no more steps, so its learning rate stays."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with model.join():
        for x, y in batches(rank, 10 + 10 * rank):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            schedule.step()


@quiet
def compiled(rank, size):
    model = torch.compile(dpfuse.DistributedDataParallel(mlp()), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def patched(rank, size):
    from torch.nn.parallel import DistributedDataParallel

    with dpfuse.patch():
        model = DistributedDataParallel(mlp())
    assert model._options.common["check_training"] == "warn"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
