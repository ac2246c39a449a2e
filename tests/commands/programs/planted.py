"""Programs with one thing wrong: `planted.py NAME` with torch's class, and many as `planted.py NAME ours` with ours."""

import os
import queue
import threading
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training import batches, loss_of, net, run, seeded, train, trained

import dpfuse

PROGRAMS = {}
PLANT = 5  # the step in which something begins to be wrong, if it does not from the start


def program(function):
    PROGRAMS[function.__name__] = function
    return function


# --- Loops that are wrong on every rank ---


@program
def switch_behind_the_forward(rank, size):
    model, optimizer = trained(1e-3, optimizer=torch.optim.AdamW)
    for index, (x, y) in enumerate(batches()):
        loss = loss_of(model(x), y) / 4
        model.require_backward_grad_sync = index % 4 == 3
        loss.backward()
        if index % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


@program
def whole_training_in_no_sync(rank, size):
    model, optimizer = trained()
    with model.no_sync():
        train(model, optimizer)


@program
def forward_in_no_sync_and_backward_behind_it(rank, size):
    model, optimizer = trained()
    for x, y in batches():
        with model.no_sync():
            loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def last_batches_of_an_epoch_are_not_averaged(rank, size):
    model, optimizer = trained()
    length = 19
    for epoch in range(100):
        for index, (x, y) in enumerate(batches(length, number=epoch)):
            with model.no_sync() if index % 2 == 0 else nullcontext():
                loss_of(model(x), y).backward()
            if index % 2 or index + 1 == length:
                optimizer.step()
                optimizer.zero_grad()


@program
def last_batches_of_an_epoch_are_zeroed(rank, size):
    model, optimizer = trained()
    for epoch in range(100):
        optimizer.zero_grad()
        for index, (x, y) in enumerate(batches(19, number=epoch)):
            with model.no_sync() if index % 2 == 0 else nullcontext():
                loss_of(model(x), y).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()


@program
def optimizer_of_the_head_alone(rank, size):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.module[2].parameters())
    for x, y in batches():
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@program
def loader_without_a_distributed_sampler(rank, size):
    model, optimizer = trained()
    data = TensorDataset(*(torch.randn(400, width, generator=seeded(0)) for width in (4, 3)))
    for epoch in range(100):
        train(model, optimizer, DataLoader(data, batch_size=4, shuffle=True, generator=seeded(0, epoch)))


@program
def clipping_after_each_batch(rank, size):
    model, optimizer = trained()
    for index, (x, y) in enumerate(batches()):
        with model.no_sync() if index % 4 != 3 else nullcontext():
            loss_of(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@program
def schedule_that_sees_the_loss_of_its_rank(rank, size):
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step(loss.item())


@program
def rank_0_stays_in_eval_mode(rank, size):
    model, optimizer = trained(model=nn.Sequential(net(), nn.Dropout(0.1)))
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if index == PLANT and rank == 0:
            model.eval()
            with torch.no_grad():
                model(x)


@program
def each_rank_wraps_with_a_group_of_its_own(rank, size):
    groups = [dist.new_group([other]) for other in range(size)]
    model, optimizer = trained(process_group=groups[rank])
    train(model, optimizer)


@program
def hook_clamps_gradients_of_rank_0(rank, size):
    model, optimizer = trained()
    if rank == 0:
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    train(model, optimizer)


@program
def accumulation_without_no_sync(rank, size):
    model, optimizer = trained()
    for index, (x, y) in enumerate(batches()):
        (loss_of(model(x), y) / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@program
def epoch_of_the_sampler_is_not_set(rank, size):
    model, optimizer = trained()
    data = TensorDataset(*(torch.randn(40 * size, width, generator=seeded(0)) for width in (4, 3)))
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True)
    for _ in range(100):
        train(model, optimizer, DataLoader(data, batch_size=4, sampler=sampler))


# --- Calls around steps; "here" is the line that is named ---


@program
def never_zeroed(rank, size):
    model, optimizer = trained(1e-3, optimizer=torch.optim.AdamW)
    for x, y in batches():
        loss_of(model(x), y).backward()
        optimizer.step()  # here


@program
def zeroed_once_an_epoch(rank, size):
    model, optimizer = trained(1e-3)
    for epoch in range(100):
        optimizer.zero_grad()
        window = []
        for batch in batches(40, number=epoch):
            window.append(batch)
            if len(window) == 2:
                for micro, (x, y) in enumerate(window):
                    model.require_backward_grad_sync = micro == 1
                    (loss_of(model(x), y) / 2).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # here
                window.clear()


@program
def critic_is_never_zeroed(rank, size):
    maker, critic = DistributedDataParallel(nn.Linear(2, 4)), DistributedDataParallel(nn.Linear(4, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    for x, _ in batches():
        made = maker(x[:, :2])
        (critic(made.detach()).mean() - critic(x).mean()).backward()
        of_critic.step()  # here
        of_maker.zero_grad()
        (-critic(made).mean()).backward()
        of_maker.step()


@program
def zeroed_before_each_batch(rank, size):
    model, optimizer = trained(optimizer=torch.optim.Adam)
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()  # here
        with model.no_sync() if index % 4 != 3 else nullcontext():
            (loss_of(model(x), y) / 4).backward()
        if index % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


@program
def zeroed_after_each_batch_and_scaled(rank, size):
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for index, (x, y) in enumerate(batches(), start=1):
        scaler.scale(loss_of(model(x), y)).backward()
        if index % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
        model.zero_grad(set_to_none=False)  # here


@program
def zeroed_one_batch_late(rank, size):
    class Loop:
        def __init__(self):
            self.model, self.optimizer = trained()

        def train(self, index, x, y):
            self.model.require_backward_grad_sync = index % 3 == 2
            loss_of(self.model(x), y).backward()
            if index % 3 == 0:
                self.optimizer.zero_grad()  # here
            if index % 3 == 2:
                self.optimizer.step()

    loop = Loop()
    for index, (x, y) in enumerate(batches()):
        loop.train(index, x, y)


@program
def norm_clipped_before_unscaling(rank, size):
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu")
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@program
def values_clipped_before_the_step_of_a_scaler(rank, size):
    model, optimizer = trained(optimizer=torch.optim.Adam)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    params = [*model.parameters()]
    micro_batches = batches()
    while True:
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext(), torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(next(micro_batches)[0]).float(), 0) / 2
            scaler.scale(loss).backward()
        nn.utils.clip_grad_value_(params, clip_value=0.5)  # here
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@program
def schedule_stepped_after_each_batch(rank, size):
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for index, (x, y) in enumerate(batches()):
        (loss_of(model(x), y) / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()  # here


@program
def warm_up_stepped_inside_the_window(rank, size):
    model, optimizer = trained(optimizer=torch.optim.AdamW)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[20])
    stream = batches()
    for _ in range(300):
        optimizer.zero_grad()
        for micro in range(3):
            x, y = next(stream)
            with nullcontext() if micro == 2 else model.no_sync():
                loss_of(model(x), y).div(3).backward()
            schedule.step()  # here
        optimizer.step()


# --- Numbers that are not finite ---


@program
def float16_overflows_on_rank_1(rank, size):
    model, optimizer = trained()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        outputs = model(x)
        if rank == 1 and step >= PLANT:
            outputs = (2**20 * outputs).half().float() / 2**20
        loss_of(outputs, y).backward()
        optimizer.step()


@program
def scaler_that_skips_half(rank, size):
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        outputs = model(x)
        if rank == 1 and step >= PLANT and step % 2:
            outputs = (2**20 * outputs).half().float() / 2**20
        scaler.scale(loss_of(outputs, y)).backward()
        scaler.step(optimizer)
        scaler.update()


# --- Weights that leave those of the other ranks ---


def drifting(change_before=None, change_after=None, leave_out=False):
    """Train; on the last rank something is done before or behind a step, from step `PLANT` on."""

    def train(rank, size):
        model, optimizer = trained()
        for step, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            differs = rank == size - 1 and step >= PLANT
            if differs and change_before is not None:
                change_before(model.module, optimizer, step)
            if not (differs and leave_out and step == PLANT):
                optimizer.step()
            if differs and change_after is not None:
                with torch.no_grad():
                    change_after(model.module, optimizer, step)

    return train


def once(change):
    return lambda *given: change(*given) if given[-1] == PLANT else None


PROGRAMS["a_weight_is_edited"] = drifting(change_after=once(lambda module, *_: module[0].weight[1, 2].add_(0.5)))
PROGRAMS["another_learning_rate"] = drifting(lambda _, optimizer, __: optimizer.param_groups[0].update(lr=0.011))
PROGRAMS["a_step_is_left_out"] = drifting(leave_out=True)
PROGRAMS["gradients_are_clipped"] = drifting(lambda module, *_: nn.utils.clip_grad_norm_(module.parameters(), 1e-4))
PROGRAMS["a_gradient_is_changed_behind_backward"] = drifting(once(lambda module, *_: module[2].weight.grad.mul_(2)))
PROGRAMS["states_are_loaded"] = drifting(
    change_after=once(lambda module, *_: module.load_state_dict({n: v + 0.2 for n, v in module.state_dict().items()}))
)
PROGRAMS["weights_get_noise"] = drifting(
    change_after=lambda module, *_: [param.add_(torch.randn_like(param) * 1e-2) for param in module.parameters()]
)


@program
def one_rank_freezes_a_layer_for_its_optimizer(rank, size):
    model = DistributedDataParallel(net())
    params = model.module[2].parameters() if rank else model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.01)
    for x, y in batches():
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- Numbers that depend on the class of the wrapper: no bug of dpfuse is left that would make them differ ---


def by_class(change):
    """Train; under dpfuse, something is done to the model, the optimizer or the batch of step `PLANT`."""

    def train(rank, size):
        model, optimizer = trained()
        ours = type(model).__module__.startswith("dpfuse")
        for step, (x, y) in enumerate(batches()):
            plant = change if ours and step == PLANT else nothing
            optimizer.zero_grad()
            y = plant("targets", y)
            outputs = plant("outputs", model(x))
            loss_of(outputs, y).backward()
            plant("averaged", model.module)
            plant("before the step", optimizer)
            optimizer.step()

    return train


def nothing(point, value):
    return value


def another_rate(point, value):
    if point == "before the step":
        value.param_groups[0]["lr"] *= 2
    return value


def other_targets(point, value):
    return -value if point == "targets" else value


def scaled_gradients(point, value):
    if point == "averaged":
        for param in value.parameters():
            param.grad *= 1.5
    return value


def another_backward(point, value):
    if point == "outputs":
        value.register_hook(lambda grad: grad * (1 + 1e-4))
    return value


for change in (another_rate, other_targets, scaled_gradients, another_backward):
    PROGRAMS[f"under_dpfuse_{change.__name__}"] = by_class(change)


# --- Programs that are not equal to themselves ---


@program
def the_clock_in_the_inputs(rank, size):
    model, optimizer = trained()
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(model(x + (time.time() % 1 if step >= PLANT else 0)), y).backward()
        optimizer.step()


@program
def a_seed_of_the_system(rank, size):
    model, optimizer = trained()
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "big"))
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model(x + 0.1 * torch.randn(5, 4, generator=generator)), y).backward()
        optimizer.step()


@program
def the_order_of_a_set(rank, size):
    model, optimizer = trained()
    order = [int(name[5:]) for name in {f"file {number}" for number in range(400)}]  # Python seeds hashes at random
    samples = torch.randn(400, 4, generator=seeded(0))
    for step in range(1000):
        optimizer.zero_grad()
        model(samples[[order[(5 * step + place + 31 * rank) % 400] for place in range(5)]]).square().mean().backward()
        optimizer.step()


@program
def a_race_of_two_threads(rank, size):
    model, optimizer = trained()
    ready = queue.Queue(8)

    def read(number):
        for x, y in batches(number=number):
            time.sleep(0.001 * (time.perf_counter_ns() % 7))  # as a disk does
            ready.put((x, y))

    for number in range(4):
        threading.Thread(target=read, args=(number,), daemon=True).start()
    for _ in range(1000):
        x, y = ready.get()
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- Ranks that make fewer steps, and time that is lost ---


def stepping(rank_without, steps, start=0.0):
    """A program in which one rank makes so many steps, and only backwards behind them."""

    def loop(rank, size):
        model, optimizer = trained()
        for step, (x, y) in enumerate(batches()):
            time.sleep(start if not step else 0)  # as where a compiler or a large data set begins
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            if rank != rank_without or step < steps:
                optimizer.step()

    return loop


PROGRAMS["rank_1_never_steps"] = stepping(1, 0)
PROGRAMS["rank_0_never_steps"] = stepping(0, 0)
PROGRAMS["rank_1_stops_stepping"] = stepping(1, 20, start=1.5)


@program
def the_loader_is_slow(rank, size):
    class Slow(TensorDataset):
        def __getitem__(self, index):
            time.sleep(0.004)
            return super().__getitem__(index)

    model, optimizer = trained()
    samples = torch.randn(2000, 4, generator=seeded(rank)), torch.randn(2000, 3, generator=seeded(rank, 1))
    for x, y in DataLoader(Slow(*samples), batch_size=5):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@program
def the_forward_of_rank_1_is_slow(rank, size):
    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.02 * rank)
            return x

    model, optimizer = trained(model=nn.Sequential(Slow(), net()))
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# --- Programs that use dpfuse's class already ---


@program
def own_class_and_another_rate(rank, size):
    model = dpfuse.DataParallel(net())
    train(model, torch.optim.SGD(model.parameters(), lr=0.01 * (rank + 1)))


@program
def another_rate_from_the_start(rank, size):
    train(*trained(0.01 * (rank + 1)))


@program
def own_class_that_sends_16_bits(rank, size):
    train(*trained(kind=dpfuse.DistributedDataParallel, wire_dtype=torch.bfloat16))


@program
def own_class_and_a_branch(rank, size):
    """A layer that every second batch uses, which is right under dpfuse."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.calls = nn.Linear(4, 3), nn.Linear(4, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.first(x) + (self.second(x) if self.calls % 2 else 0)

    train(*trained(model=Net(), kind=dpfuse.DistributedDataParallel))


# --- Programs that fail under torch's class ---


@program
def evaluation_on_rank_0_alone(rank, size):
    """Its last call sends buffers to a rank that has ended."""
    model, optimizer = trained(model=nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    train(model, optimizer, batches(12))
    if rank == 0:
        model.eval()
        for x, _ in batches(3):
            model(x)


@program
def fewer_batches_on_rank_1(rank, size):
    model, optimizer = trained()
    train(model, optimizer, batches(12 - 2 * rank))


@program
def a_layer_that_is_not_used(rank, size):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.never = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    train(*trained(model=Net()))


@program
def barrier_in_the_save_of_rank_0(rank, size):
    model, optimizer = trained()
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if index % 4 == 3 and rank == 0:
            dist.barrier()


@program
def wider_layer_on_rank_1(rank, size):
    train(*trained(model=nn.Sequential(nn.Linear(4, 8 + rank), nn.Linear(8 + rank, 3))))


if __name__ == "__main__":
    run(PROGRAMS)
