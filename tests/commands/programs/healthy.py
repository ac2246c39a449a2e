"""Programs that are right, though a careless check could take some of them for wrong: `healthy.py NAME`."""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training import batches, loss_of, net, run, seeded, train, trained

import dpfuse

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@program
def plain(rank, size):
    model, optimizer = trained()
    train(model, optimizer)


@program
def accumulation_with_zeros_kept(rank, size):
    model, optimizer = trained()
    for index, (x, y) in enumerate(batches()):
        with model.no_sync() if index % 3 != 2 else nullcontext():
            loss_of(model(x), y).backward()
        if index % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@program
def scaler_that_skips_a_step(rank, size):
    """A loss of infinity in window 3: the scaler skips that step, on all ranks."""
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y) * (torch.inf if index == 7 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@program
def gradients_read_for_a_log(rank, size):
    model, optimizer = trained()
    for x, y in batches():
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.zero_grad()


@program
def penalty_in_no_sync_before(rank, size):
    """R1 of a discriminator: the penalty is averaged with the loss behind it."""
    model, optimizer = trained(optimizer=torch.optim.Adam)
    for x, y in batches():
        optimizer.zero_grad()
        with model.no_sync():
            inputs = x.requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            slope.square().sum().backward()
        loss_of(model(x.detach()), y).backward()
        optimizer.step()


@program
def sharpness_aware_minimisation(rank, size):
    model, optimizer = trained()
    for x, y in batches():
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


@program
def optimizers_of_different_cadence(rank, size):
    model = DistributedDataParallel(net())
    often = torch.optim.SGD(model.module[0].parameters(), lr=0.01)
    seldom = torch.optim.SGD(model.module[2].parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches()):
        loss_of(model(x), y).backward()
        often.step()
        often.zero_grad()
        if index % 4 == 3:
            seldom.step()
            seldom.zero_grad()


@program
def ema_and_evaluation(rank, size):
    model, optimizer = trained()
    average = copy.deepcopy(model.module)
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, param in zip(average.parameters(), model.module.parameters(), strict=True):
                kept.lerp_(param, 0.1)
            model(x)
        average(x)


@program
def one_batch_overfitted_on_purpose(rank, size):
    model, optimizer = trained()
    ((x, y),) = batches(1, rank=0)
    for _ in range(1000):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@program
def average_by_hand(rank, size):
    model, optimizer = trained()
    with model.no_sync():
        for x, y in batches():
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= size
            optimizer.step()


@program
def local_sgd_by_hand(rank, size):
    model, optimizer = trained()
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        if index % 6 == 5:
            for param in model.parameters():
                dist.all_reduce(param.data)
                param.data /= size


@program
def post_local_sgd_of_torch(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model, optimizer = trained()
    groups = [dist.new_group([other]) for other in range(size)]
    state = hooks.PostLocalSGDState(process_group=None, subgroup=groups[rank], start_localSGD_iter=6)
    model.register_comm_hook(state, hooks.post_localSGD_hook)
    averaging = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=4, warmup_steps=6))
    for x, y in batches():
        averaging.zero_grad()
        loss_of(model(x), y).backward()
        averaging.step()


@program
def states_of_the_optimizer_on_one_rank_each(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer)


@program
def ranks_with_fewer_batches(rank, size):
    """A rank without inputs makes no more steps."""
    model, optimizer = trained()
    with model.join():
        train(model, optimizer, batches(8 + 100 * rank))


@program
def parameters_that_are_seldom_used(rank, size):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])

        def forward(self, x, branch):
            return self.layers[branch](x)

    model, optimizer = trained(model=Branches(), find_unused_parameters=True)
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(model(x, {13: 1, 17: 2}.get(index, 0)), y).backward()
        optimizer.step()


@program
def backbone_frozen_in_the_beginning(rank, size):
    model, optimizer = trained(find_unused_parameters=True)
    model.module[0].requires_grad_(False)
    train(model, optimizer)


@program
def batch_normalization_dropout_and_a_schedule(rank, size):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    model, optimizer = trained(0.05, module, torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    torch.manual_seed(rank)
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        schedule.step()


@program
def sampler_with_its_epoch(rank, size):
    model, optimizer = trained()
    data = TensorDataset(*(torch.randn(40 * size, width, generator=seeded(0)) for width in (4, 3)))
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        train(model, optimizer, DataLoader(data, batch_size=4, sampler=sampler))


@program
def samplers_in_order_and_of_a_validation(rank, size):
    """The order of a validation is of no consequence, so its sampler needs no epoch."""
    model, optimizer = trained()
    data = TensorDataset(*(torch.randn(24 * size, width, generator=seeded(0)) for width in (4, 3)))
    in_order, validation = (DistributedSampler(data, size, rank, shuffle=shuffle) for shuffle in (False, True))
    for _ in range(100):
        train(model, optimizer, DataLoader(data, batch_size=4, sampler=in_order))
        with torch.no_grad():
            for x, _ in DataLoader(data, batch_size=4, sampler=validation):
                model(x)


@program
def last_batches_of_an_epoch_are_averaged(rank, size):
    model, optimizer = trained()
    for epoch in range(100):
        for index, (x, y) in enumerate(batches(19, number=epoch)):
            last = index % 2 == 1 or index == 18
            with nullcontext() if last else model.no_sync():
                loss_of(model(x), y).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()


@program
def gradients_masked_after_each_batch(rank, size):
    """Some rows are not to be trained."""
    model, optimizer = trained()
    for index, (x, y) in enumerate(batches()):
        with model.no_sync() if index % 3 != 2 else nullcontext():
            loss_of(model(x), y).backward()
        model.module[0].weight.grad[2:] = 0
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@program
def sparse_embedding(rank, size):
    torch.manual_seed(1)
    model, optimizer = trained(model=nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3)))
    generator = seeded(rank)
    for _ in range(1000):
        optimizer.zero_grad()
        model(torch.randint(0, 50, (5,), generator=generator)).square().mean().backward()
        optimizer.step()


@program
def state_of_a_recurrent_net(rank, size):
    torch.manual_seed(1)
    model, optimizer = trained(model=nn.RNN(4, 3, batch_first=True))
    state = torch.zeros(1, 5, 3)
    for x, y in batches():
        outputs, state = model(x[:, None], state.detach())
        optimizer.zero_grad()
        loss_of(outputs[:, 0], y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@program
def closures(rank, size):
    model, optimizer = trained()
    for x, y in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


# --- Calls around steps that come near to wrong ones ---


@program
def gradients_dropped_by_hand(rank, size):
    model, optimizer = trained()
    for x, y in batches():
        loss_of(model(x), y).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None


@program
def gradients_zeroed_by_hand(rank, size):
    model, optimizer = trained()
    for x, y in batches():
        for param in model.parameters():
            if param.grad is not None:
                param.grad.data.zero_()
        loss_of(model(x), y).backward()
        optimizer.step()


@program
def running_mean_in_the_gradients(rank, size):
    """Momentum without memory of an optimizer."""
    model, optimizer = trained()
    for x, y in batches():
        (0.1 * loss_of(model(x), y)).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad.mul_(0.9)


@program
def each_of_two_zeroes_the_other(rank, size):
    maker, critic = DistributedDataParallel(nn.Linear(2, 4)), DistributedDataParallel(nn.Linear(4, 1))
    of_maker, of_critic = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (maker, critic))
    for x, _ in batches():
        made = maker(x[:, :2])
        critic.zero_grad()
        (critic(made.detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        maker.zero_grad()
        (-critic(made).mean()).backward()
        of_maker.step()


@program
def extragradient(rank, size):
    """The gradient of one batch leads to a point ahead; that of the next batch, there, is stepped on."""
    model, optimizer = trained()
    params = [*model.parameters()]

    def backward(x, y):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()

    stream = batches()
    for first in stream:
        backward(*first)
        kept = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param -= 0.01 * param.grad
        backward(*next(stream))
        with torch.no_grad():
            for param, old in zip(params, kept, strict=True):
                param.copy_(old)
        optimizer.step()


@program
def attack_on_the_inputs(rank, size):
    """The first gradient is that of the inputs; those of the weights are dropped."""
    model, optimizer = trained()
    for x, y in batches():
        x.requires_grad_()
        loss_of(model(x), y).backward()
        optimizer.zero_grad()
        loss_of(model(x.detach() + 0.1 * x.grad.sign()), y).backward()
        optimizer.step()


@program
def gradients_of_two_batches_combined(rank, size):
    """Where they contradict each other, the part that does is left out."""
    model, optimizer = trained()
    params = [*model.parameters()]

    def gradients(x, y):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        return [param.grad.clone() for param in params]

    stream = batches()
    for memory in stream:
        old, new = gradients(*memory), gradients(*next(stream))
        for param, one, other in zip(params, old, new, strict=True):
            param.grad = other - one * ((one * other).sum() / one.square().sum()).clamp(max=0)
        optimizer.step()


@program
def newton_with_other_batches(rank, size):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    stream = batches()

    def closure():
        optimizer.zero_grad()
        x, y = next(stream)
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    for _ in range(300):
        optimizer.step(closure)


@program
def limit_times_the_scale(rank, size):
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu")
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()


@program
def norm_for_a_log_and_a_scaler_that_is_off(rank, size):
    model, optimizer = trained()
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        now = off if index % 2 else scaler
        now.scale(loss_of(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 if now is off else torch.inf)
        now.step(optimizer)
        now.update()


@program
def two_schedules_after_each_step(rank, size):
    model, optimizer = trained()
    first, second, third = (torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) for _ in range(3))
    both = torch.optim.lr_scheduler.ChainedScheduler([first, second])
    for index, (x, y) in enumerate(batches()):
        with model.no_sync() if index % 2 == 0 else nullcontext():
            (loss_of(model(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            both.step()
            third.step()
            optimizer.zero_grad()


@program
def schedule_that_counts_a_scaler_that_skips(rank, size):
    """It is stepped in each iteration, and the scaler skips every second one, until the scale fits."""
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y) * (torch.inf if index in range(2, 18, 2) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()


@program
def own_class(rank, size):
    """With buffers, which both classes send; arguments of its own change no number."""
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    train(*trained(model=network, kind=dpfuse.DistributedDataParallel, check_training="log", stall_timeout=30.0))


@program
def own_class_of_paddle_names(rank, size):
    model = dpfuse.DataParallel(net(), comm_buffer_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches()):
        with model.no_sync() if index % 2 == 0 else nullcontext():
            (loss_of(model(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run(PROGRAMS)
