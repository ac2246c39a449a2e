"""Training loops that are right, though a careless check could take them for wrong. None of them gets a message."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.loops.nets import Wrapping, batch, batches, loss_of, mlp, seeded, train, with_sgd

__all__ = ["PROGRAMS"]

Loop = Callable[[int, int], None]  # gets rank and number of ranks
PROGRAMS: dict[str, Loop] = {}


def quiet(program: Loop) -> Loop:
    """Add a program that gets no message."""
    PROGRAMS[program.__name__] = program
    return program


def average_gradients(module):
    """Average the gradients as programs did before there was DDP."""
    for param in module.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def average_weights(module):
    """Local SGD's average."""
    for param in module.parameters():
        dist.all_reduce(param.data)
        param.data /= dist.get_world_size()


# --- Accumulation ---


@quiet
def plain(rank, size):
    train(*with_sgd(dpfuse.DistributedDataParallel(mlp())), batches(rank, 30))


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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 20):
        optimizer.zero_grad()
        outputs = model(x)
        loss_of(outputs, y).backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()


@quiet
def in_buckets(rank, size):
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp(), accumulate_in_buckets=True))
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            model.zero_grad()


@quiet
def scaler_that_skips_steps(rank, size):
    """A loss of infinity in window 3: the scaler skips that step, on all ranks."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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


@quiet
def unscaled_and_cut_at_one_value(rank, size):
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 0):
            scaler.scale(loss_of(model(x), y)).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@quiet
def local_rest_that_is_averaged_by_hand_and_then_unscaled_and_cut(rank, size):
    """The second backward is local, and the program averages the sum once more: the mean stays what it was."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync(enabled=index % 2 == 1):
            scaler.scale(loss_of(model(x), y)).backward()
        if index % 2:
            average_gradients(model)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@quiet
def local_rest_that_all_ranks_have_then_unscaled_and_cut(rank, size):
    """As a replayed batch: it is suspected, and the weights are equal."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for (x, y), (common, target) in zip(batches(rank, 20), batches(7, 20), strict=True):
        scaler.scale(loss_of(model(x), y)).backward()
        with model.no_sync():
            scaler.scale(loss_of(model(common), target)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@quiet
def a_window_that_is_dropped_once(rank, size):
    """All ranks have agreed that its loss is no number."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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


@quiet
def weights_kept_for_a_longer_memory(rank, size):
    """Momentum by hand: gradients are not zeroed, but shrunk after each step."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 20):
        loss_of(model(x), y).backward()
        optimizer.step()
        torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)


@quiet
def contexts_on_an_exit_stack(rank, size):
    models = [dpfuse.DistributedDataParallel(mlp()), dpfuse.DistributedDataParallel(mlp())]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 48)):
        with ExitStack() as stack:
            if index % 4 != 3:
                for model in models:
                    stack.enter_context(model.no_sync())
            loss_of(models[0](x) + models[1](x), y).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def hugging_face_style_with_a_short_last_window(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    steps_in_epoch, accumulation, max_grad_norm = 14, 4, 1.0
    for epoch in range(6):
        model.train()
        model.zero_grad()
        for step, (x, y) in enumerate(batches(rank, steps_in_epoch, epoch)):
            is_last = (step + 1) % accumulation == 0 or (step + 1) == steps_in_epoch
            context = nullcontext if is_last else model.no_sync
            with context():
                (loss_of(model(x), y) / accumulation).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                schedule.step()
                model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x)


@quiet
def scaler_whose_first_steps_are_skipped(rank, size):
    """The scale begins far too high, as it does by default."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for x, y in batches(rank, 30):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss_of(model(x), y) * 16).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@quiet
def optimizers_made_anew_each_epoch(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    for epoch in range(5):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (epoch + 1))
        train(model, optimizer, batches(rank, 12, epoch), window=2)


@quiet
def an_optimizer_for_each_parameter(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizers = [torch.optim.SGD([param], lr=0.01) for param in model.parameters()]
    for index, (x, y) in enumerate(batches(rank, 48)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@quiet
def gradients_dropped_in_a_hook_behind_the_step(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    optimizer.register_step_post_hook(lambda *_: [setattr(param, "grad", None) for param in model.parameters()])
    for x, y in batches(rank, 24):
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def swa_swapped_in_for_evaluation(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    average = torch.optim.swa_utils.AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.005, anneal_epochs=2)
    for index, (x, y) in enumerate(batches(rank, 30)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if index % 6 == 5:
            average.update_parameters(model.module)
            schedule.step()
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(average.module.state_dict())
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            model.module.load_state_dict(kept)


@quiet
def learning_rate_finder(rank, size):
    """100 rates in a row, then the weights from before."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for index, (x, y) in enumerate(batches(rank, 24)):
        for group in optimizer.param_groups:
            group["lr"] = 1e-7 * 1.5**index
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    train(model, optimizer, batches(rank, 12))


# --- Local backwards on purpose ---


@quiet
def gradients_read_for_a_log(rank, size):
    """A local backward between steps shows what this rank's gradient is."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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
def sam_of_each_rank(rank, size):
    """Sharpness-aware minimisation: the first backward is local and zeroed, the second is averaged."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 1):
            loss_of(model(x), y).backward()
        if index % 2:
            average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@quiet
def fused_average_by_hand_after_a_mixed_window(rank, size):
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp()))
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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))

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
def one_batch_overfitted_on_purpose(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    x, y = batch(seeded(0))
    for _ in range(24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- The ranks train apart, or average by themselves ---


@quiet
def average_by_hand(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    with model.no_sync():
        for x, y in batches(rank, 30):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


@quiet
def average_in_hooks_of_the_parameters(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))

    def average(grad):
        grad = grad / size
        dist.all_reduce(grad)
        return grad

    for param in model.parameters():
        param.register_hook(average)
    with model.no_sync():
        train(model, optimizer, batches(rank, 30))


@quiet
def local_sgd_by_hand(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 30)):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        if index % 6 == 5:
            average_weights(model)


@quiet
def local_steps_between_averaged_ones(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 1):
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=index % 4 < 2)
        if index % 2:
            average_weights(model)


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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 30)):
        optimizer.zero_grad()
        with model.no_sync(enabled=index % 16 != 15):
            loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def two_heads_whose_average_comes_last(rank, size):
    """The auxiliary loss is accumulated on this rank, and the backward of the main one averages both."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.trunk, self.main, self.auxiliary = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x, main):
            hidden = self.trunk(x).tanh()
            return self.auxiliary(hidden), self.main(hidden) if main else None

    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(Heads(), find_unused_parameters=True))
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(x, False)[0], y).backward()
        auxiliary, main = model(x, True)
        (loss_of(main, y) + 0.1 * loss_of(auxiliary, y)).backward()
        optimizer.step()


@quiet
def stages_that_keep_their_wrappers(rank, size):
    """The first wrapper leaves the backwards of the second one to it, also those that average nothing."""
    net, stages = mlp(), []
    for stage in range(2):
        model = dpfuse.DataParallel(net)
        stages.append(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in batches(rank, 12, stage):
            optimizer.zero_grad()
            if stage:
                with model.no_sync():
                    loss_of(model(x), y).backward()
                sums = net[0].weight.grad.clone()
                dist.all_reduce(sums)
                assert not torch.allclose(net[0].weight.grad, sums / size)
            loss_of(model(x), y).backward()
            sums = net[0].weight.grad.clone()
            dist.all_reduce(sums)
            torch.testing.assert_close(net[0].weight.grad, sums / size)
            optimizer.step()


@quiet
def wrapper_that_is_held_by_a_cycle_while_the_next_one_accumulates(rank, size):
    """A trainer refers to itself, so the garbage collector has not freed it when the module is wrapped again."""
    net = mlp()
    for stage in range(2):

        class Trainer:
            pass

        trainer = Trainer()
        trainer.itself, trainer.model = trainer, dpfuse.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for index, (x, y) in enumerate(batches(rank, 24, stage)):
            with trainer.model.no_sync(enabled=index % 2 == 0):
                loss_of(trainer.model(x), y).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()


@quiet
def backbone_that_is_unfrozen_with_a_group_of_its_own(rank, size):
    net = mlp()
    net[0].requires_grad_(False)
    model = dpfuse.DataParallel(net)
    optimizer = torch.optim.Adam(net[2].parameters())
    for step, (x, y) in enumerate(batches(rank, 40)):
        if step == 5:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 1e-4})
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def adapter_that_is_added_with_a_new_optimizer(rank, size):
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp()))
    for step, (x, y) in enumerate(batches(rank, 40)):
        if step == 5:
            torch.manual_seed(5)
            model.module.append(nn.Linear(3, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def diloco(rank, size):
    """An outer optimizer steps on the mean of how far the ranks have come."""

    class DiLoCo:
        def __init__(self, module):
            self.model = dpfuse.DistributedDataParallel(module)
            self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.global_params = [param.detach().clone() for param in self.model.parameters()]
            self.outer = torch.optim.SGD(self.global_params, lr=0.7, momentum=0.9, nesterov=True)

        def inner_step(self, x, y):
            with self.model.no_sync():
                loss_of(self.model(x), y).backward()
            self.inner.step()
            self.inner.zero_grad()

        def outer_step(self):
            for kept, param in zip(self.global_params, self.model.parameters(), strict=True):
                delta = kept - param.detach()
                dist.all_reduce(delta)
                kept.grad = delta / dist.get_world_size()
            self.outer.step()
            with torch.no_grad():
                for kept, param in zip(self.global_params, self.model.parameters(), strict=True):
                    param.copy_(kept)

    run = DiLoCo(mlp())
    for step, (x, y) in enumerate(batches(rank, 40), 1):
        run.inner_step(x, y)
        if step % 30 == 0:
            run.outer_step()


@quiet
def post_local_sgd_by_hand_with_old_zeros(rank, size):
    """`grad.data.zero_()` leaves torch's count of writes as it is."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 30)):
        with model.no_sync() if index >= 10 else nullcontext():
            loss_of(model(x), y).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad.data.zero_()
        if index >= 10 and index % 4 == 0:
            average_weights(model)


# --- Models that are converted ---


@quiet
def bfloat16_after_the_first_backward(rank, size):
    """The first batch was to find out what memory is needed."""
    model, optimizer = with_sgd(dpfuse.DataParallel(mlp()))
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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 24)):
        dtype = next(model.parameters()).dtype
        model.require_backward_grad_sync = index % 3 == 2
        loss_of(model(x.to(dtype)), y.to(dtype)).backward()
        if index == 10:
            model.double()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


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
def backbone_frozen_after_wrapping_and_back(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 30)):
        model.module[0].requires_grad_(not 5 <= index < 20)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def learning_rate_of_zero_at_first(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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
    train(model, optimizer, batches(rank, 50), window=2)


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
    train(model, optimizer, batches(rank, 26))


@quiet
def two_phases_with_an_optimizer_each(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    for layer in (model.module[0], model.module[2]):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for other in (model.module[0], model.module[2]):
            other.requires_grad_(other is layer)
        train(model, optimizer, batches(rank, 26))


@quiet
def warmup_of_one_optimizer(rank, size):
    """The backbone is held for 30 steps by not stepping its optimizer."""
    model = dpfuse.DistributedDataParallel(mlp())
    head = torch.optim.SGD(model.module[2].parameters(), lr=0.01)
    backbone = torch.optim.SGD(model.module[0].parameters(), lr=0.001)
    for step, (x, y) in enumerate(batches(rank, 40)):
        head.zero_grad()
        backbone.zero_grad()
        loss_of(model(x), y).backward()
        head.step()
        if step >= 30:
            backbone.step()


@quiet
def warmup_of_one_wrapped_optimizer(rank, size):
    """As accelerate wraps each. The second one begins late."""
    model = dpfuse.DistributedDataParallel(mlp())
    head, backbone = (Wrapping(torch.optim.SGD(model.module[place].parameters(), lr=0.01)) for place in (2, 0))
    for step, (x, y) in enumerate(batches(rank, 40)):
        model.zero_grad()
        loss_of(model(x), y).backward()
        head.step()
        if step >= 30:
            backbone.step()


@quiet
def critic_that_waits_for_its_generator(rank, size):
    """VQGAN's `disc_start`: the critic has a loss from a later step on, its gradients are averaged from the first."""
    generator = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    for step, (x, y) in enumerate(batches(rank, 40)):
        fake = generator(x)
        (loss_of(fake, y) - 0.1 * critic(fake).mean()).backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        if step > 30:
            (critic(fake.detach()).mean() - critic(y).mean()).backward()
            of_critic.step()
            of_critic.zero_grad()


@quiet
def groups_added_while_layers_thaw(rank, size):
    """Gradual unfreezing, as of ULMFiT: a group joins the optimizer each phase."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.module[2].parameters(), lr=0.01)
    for phase in range(2):
        if phase:
            optimizer.add_param_group({"params": [*model.module[0].parameters()], "lr": 0.001})
        for x, y in batches(rank, 25, phase):
            model.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


# --- Inputs, rates and modes ---


@quiet
def schedule_value_as_the_first_input(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(Timed()))
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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(Timed()))
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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(OfObjects()))
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
def rate_in_a_tensor(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01))
    train(model, optimizer, batches(rank, 20))


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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(nn.Sequential(mlp(), nn.Dropout(0.1))))
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
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 20)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()


@quiet
def same_inputs_and_other_targets(rank, size):
    """Each rank fits its own scene at the same random coordinates."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for (x, _), (_, y) in zip(batches(0, 24), batches(rank, 24, 4), strict=True):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def augmentation_inside_the_model(rank, size):
    """The same images go into the model, which draws a noise of each rank."""
    train(*with_sgd(dpfuse.DistributedDataParallel(Noisy(rank))), batches(0, 24))


class PartOfBatch(nn.Module):
    """Takes this rank's places of the sequences that all ranks get, as sequence parallelism does."""

    def __init__(self, rank, size, drop=None):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.layers = nn.Embedding(50, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 50))
        self.drop = drop or nn.Identity()
        self._places = slice(8 * rank // size, 8 * (rank + 1) // size)

    def forward(self, tokens, labels):
        hidden = self.drop(self.embedding(tokens[:, self._places]))
        return nn.functional.cross_entropy(self.layers(hidden).flatten(0, 1), labels[:, self._places].flatten())


def token_batches(length, number=0):
    """Tokens and labels, [4, 8]: the same on all ranks."""
    generator = seeded(0, number)
    for _ in range(length):
        tokens = torch.randint(0, 50, (4, 9), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def train_on_parts(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens, labels in loader:
        optimizer.zero_grad()
        model(tokens, labels).backward()
        optimizer.step()


@quiet
def parts_of_one_batch(rank, size):
    train_on_parts(dpfuse.DataParallel(PartOfBatch(rank, size)), token_batches(24))


@quiet
def parts_of_one_batch_with_dropout(rank, size):
    train_on_parts(dpfuse.DataParallel(PartOfBatch(rank, size, nn.Dropout(0.1))), token_batches(24))


@quiet
def parts_of_one_batch_with_the_same_dropout_on_all_ranks(rank, size):
    torch.manual_seed(0)
    model = dpfuse.DistributedDataParallel(PartOfBatch(rank, size, nn.AlphaDropout(0.2)), check_training="warn")
    train_on_parts(model, token_batches(30))


@quiet
def parts_of_one_batch_of_which_only_the_last_has_labels(rank, size):
    """The gradients of all other ranks are zeros, so the mean has the direction of what the last rank has."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(PartOfBatch(rank, size, nn.Dropout(0.1))))
    for tokens, labels in token_batches(24):
        optimizer.zero_grad()
        (model(tokens, labels) * (rank == size - 1)).backward()
        optimizer.step()


@quiet
def parts_of_one_batch_in_windows(rank, size):
    model, optimizer = with_sgd(dpfuse.DataParallel(PartOfBatch(rank, size, nn.Dropout(0.1))))
    for index, (tokens, labels) in enumerate(token_batches(60)):
        with model.no_sync(enabled=index % 2 == 0):
            model(tokens, labels).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


class Noisy(nn.Module):
    """Adds noise to its inputs."""

    def __init__(self, rank):
        super().__init__()
        self.net = mlp()
        self._generator = seeded(rank, 2)

    def forward(self, x):
        return self.net(x + torch.randn(x.shape, generator=self._generator))


@quiet
def fixed_masks_and_positions(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(Masked()))
    generator = seeded(rank)
    positions, mask = torch.arange(5), torch.ones(5, 1)
    for _ in range(24):
        ids = torch.randint(0, 50, (5,), generator=generator)
        optimizer.zero_grad()
        model(input_ids=ids, position_ids=positions, attention_mask=mask)["loss"].backward()
        optimizer.step()


class Masked(nn.Module):
    """Returns a dict, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 4), nn.Embedding(5, 4)
        self.net = mlp()

    def forward(self, input_ids, position_ids, attention_mask):
        outputs = self.net(self.tokens(input_ids) + self.places(position_ids)) * attention_mask
        return {"loss": outputs.square().mean(), "logits": outputs}


# --- Ways to compute ---


@quiet
def checkpointing(rank, size):
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model, optimizer = with_sgd(dpfuse.DistributedDataParallel(Checkpointed(checkpoint, reentrant)))
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
def parameters_that_are_not_always_used(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(Branches(), find_unused_parameters=True))
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
    model, optimizer = with_sgd(
        dpfuse.DistributedDataParallel(nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3)))
    )
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

    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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
def gradients_of_other_ranks_are_weighed(rank, size):
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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
    train(model, optimizer, batches(rank, 48), window=2)


@quiet
def sixteen_bits_on_the_wire(rank, size):
    train(*with_sgd(dpfuse.DataParallel(mlp(), wire_dtype=torch.bfloat16, error_feedback=True)), batches(rank, 24))


@quiet
def deterministic_sums(rank, size):
    train(*with_sgd(dpfuse.DataParallel(mlp(), deterministic=True)), batches(rank, 40), window=2)


@quiet
def schedule_under_join(rank, size):
    """A rank without inputs makes no more steps, so its learning rate stays."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
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
    train(model, optimizer, batches(rank, 24), window=2)


@quiet
def patched(rank, size):
    from torch.nn.parallel import DistributedDataParallel

    with dpfuse.patch():
        model = DistributedDataParallel(mlp())
    assert model._options.common["check_training"] == "warn"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, batches(rank, 24))


@quiet
def evaluation_in_between_on_all_ranks(rank, size):
    model, optimizer = with_sgd(
        dpfuse.DistributedDataParallel(nn.Sequential(mlp(), nn.BatchNorm1d(3), nn.Dropout(0.1)))
    )
    for index, (x, y) in enumerate(batches(rank, 24)):
        model.train()
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if index % 3 == 0:
            model.eval()
            with torch.inference_mode():
                loss = loss_of(model(x), y).clone()
            dist.all_reduce(loss)


@quiet
def saliency_of_inputs_between_steps(rank, size):
    """A backward for the inputs alone, through the wrapper, with the weights frozen meanwhile."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        model.requires_grad_(False)
        probe = x.clone().requires_grad_()
        model(probe).sum().backward()
        model.requires_grad_(True)
        optimizer.step()


@quiet
def gradients_kept_aside_for_a_probe(rank, size):
    """What was averaged is put back before the step."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for index, (x, y) in enumerate(batches(rank, 24)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        kept = [param.grad.clone() for param in model.parameters()]
        with model.no_sync():
            loss_of(model(x), 2 * y).backward()
        for param, grad in zip(model.parameters(), kept, strict=True):
            if index % 2:
                param.grad.copy_(grad)
            else:
                param.grad = grad
        optimizer.step()


@quiet
def a_compiled_step(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    for index, (x, y) in enumerate(batches(rank, 24)):
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            step()
            optimizer.zero_grad()


@quiet
def fine_tuning_with_rates_of_layers(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    groups = [{"params": [param], "lr": 0.01 * 0.9**place} for place, param in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=30)
    for x, y in batches(rank, 30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x).float(), y)
        loss.backward()
        optimizer.step()
        schedule.step()


@quiet
def dp_sgd_with_gradients_of_samples(rank, size):
    """Each sample has a local backward that is clipped and zeroed, and the sum is averaged by hand."""
    model, optimizer = with_sgd(dpfuse.DistributedDataParallel(mlp()))
    for x, y in batches(rank, 12):
        sums = [torch.zeros_like(param) for param in model.parameters()]
        for row in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model(x[row : row + 1]), y[row : row + 1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for total, param in zip(sums, model.parameters(), strict=True):
                total += param.grad
        for total, param in zip(sums, model.parameters(), strict=True):
            dist.all_reduce(total)
            param.grad = total / (3 * size)
        optimizer.step()


# --- Several models, several losses ---


@quiet
def wgan_gp_with_several_critic_steps(rank, size):
    generator = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), betas=(0.0, 0.9))
    for step, (x, y) in enumerate(batches(rank, 40)):
        of_critic.zero_grad()
        with torch.no_grad():
            fake = generator(x)
        mixed = (0.3 * y + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (critic(fake).mean() - critic(y).mean() + 10 * penalty).backward()
        of_critic.step()
        if step % 5 == 4:
            for param in critic.parameters():
                param.requires_grad_(False)
            of_generator.zero_grad()
            (-critic(generator(x)).mean()).backward()
            of_generator.step()
            for param in critic.parameters():
                param.requires_grad_(True)


@quiet
def vae_gan_with_graphs_kept(rank, size):
    """Two losses of one forward go to two parts of a model."""
    model = dpfuse.DistributedDataParallel(mlp())
    first = torch.optim.Adam(model.module[0].parameters())
    second = torch.optim.Adam(model.module[2].parameters())
    for x, y in batches(rank, 24):
        outputs = model(x)
        first.zero_grad()
        loss_of(outputs, y).backward(retain_graph=True)
        second.zero_grad()
        outputs.abs().mean().backward()
        first.step()
        second.step()


@quiet
def first_order_maml(rank, size):
    """The inner steps are made on a copy, whose gradients go to the wrapped model by a loss of their own."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches(rank, 24):
        learner = copy.deepcopy(model.module)
        inner = torch.optim.SGD(learner.parameters(), lr=0.01)
        for _ in range(3):
            inner.zero_grad()
            loss_of(learner(x), y).backward()
            inner.step()
        inner.zero_grad()
        loss_of(learner(x), y).backward()
        for param, copied in zip(model.parameters(), learner.parameters(), strict=True):
            param.grad = copied.grad.clone()
        dpfuse.fused_allreduce_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()


@quiet
def maml_with_a_long_inner_loop(rank, size):
    """The steps of each rank are taken back, and the gradient where it has gone to is averaged."""
    model = dpfuse.DataParallel(mlp())
    outer = torch.optim.SGD(model.parameters(), lr=0.01)
    for task in range(3):
        kept = copy.deepcopy(model.module.state_dict())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(rank, 25, task):
            inner.zero_grad()
            with model.no_sync():
                loss_of(model(x), y).backward()
            inner.step()
        outer.zero_grad()
        x, y = batch(seeded(rank, 50 + task))
        loss_of(model(x), y).backward()
        model.module.load_state_dict(kept)
        outer.step()


@quiet
def sam_with_a_closure(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())

    class SAM(torch.optim.Optimizer):
        def __init__(self, params, base, rho=0.05, **kwargs):
            super().__init__(params, {"rho": rho, **kwargs})
            self.base = base(self.param_groups, **kwargs)

        @torch.no_grad()
        def step(self, closure=None):
            moves = []
            for group in self.param_groups:
                for param in group["params"]:
                    move = param.grad * group["rho"] / (param.grad.norm() + 1e-12)
                    param.add_(move)
                    moves.append((param, move))
            self.zero_grad()
            with torch.enable_grad():
                closure()
            for param, move in moves:
                param.sub_(move)
            self.base.step()

    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.01)
    for x, y in batches(rank, 24):

        def closure(x=x, y=y):
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
