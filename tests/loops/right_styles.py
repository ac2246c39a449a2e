"""More right loops, in styles of public code: GANs, reinforcement learning, meta-learning, phases, old idioms."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.loops.nets import Wrapping, batch, batches, loss_of, mlp, seeded
from tests.loops.right import quiet

# --- Weights are averaged by hand, seldom ---


def average_weights(module):
    """Local SGD's average."""
    for param in module.parameters():
        dist.all_reduce(param.data)
        param.data /= dist.get_world_size()


@quiet
def r_drop_with_epochs(rank, size):
    data = torch.utils.data.TensorDataset(*batch(seeded(0), 40 * size))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=size, rank=rank)
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            first, second = model(x), model(x)
            (loss_of(first, y) + loss_of(second, y) + loss_of(first, second)).backward()
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

    model = dpfuse.DistributedDataParallel(Heads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model(x, False)[0], y).backward()
        auxiliary, main = model(x, True)
        (loss_of(main, y) + 0.1 * loss_of(auxiliary, y)).backward()
        optimizer.step()


@quiet
def stages_that_keep_their_wrappers(rank, size):
    """The hooks of the first wrapper average what is local for the second one, so that rest is none."""
    net, stages = mlp(), []
    for stage in range(2):
        model = dpfuse.DataParallel(net)
        stages.append(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in batches(rank, 12, stage):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            if stage:
                with model.no_sync():
                    loss_of(model(x), y).backward()
                means = net[0].weight.grad.clone()
                dist.all_reduce(means)
                torch.testing.assert_close(net[0].weight.grad, means / size)
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
def backbone_that_the_optimizer_had_while_it_was_frozen(rank, size):
    """It is frozen and trained in turns, and its optimizer steps on the rest meanwhile."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(batches(rank, 60)):
        model.module[0].requires_grad_(step % 25 > 4)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def adapter_that_is_added_with_a_new_optimizer(rank, size):
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(batches(rank, 40)):
        if step == 5:
            torch.manual_seed(5)
            model.module.append(nn.Linear(3, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def local_sgd_with_a_long_period(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (index + 1) % 32 == 0:
            average_weights(model)


@quiet
def local_sgd_whose_settings_are_its_arguments(rank, size, rate=0.01, period=32):
    """They are kept for a checkpoint, which must have them all."""
    config = locals()
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for index, (x, y) in enumerate(batches(rank, 40)):
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (index + 1) % period == 0:
            average_weights(model)
    assert config == {"rank": rank, "size": size, "rate": 0.01, "period": 32}


@quiet
def local_sgd_whose_caller_keeps_its_names(rank, size, period=32):
    """A script's main function, which logs what `vars()` shows."""
    seen = vars()
    model = dpfuse.DataParallel(mlp())

    def train():
        optimizer = torch.optim.AdamW(model.parameters())
        for index, (x, y) in enumerate(batches(rank, 40)):
            with model.no_sync():
                loss_of(model(x), y).backward()
            optimizer.step()
            model.zero_grad()
            if (index + 1) % period == 0:
                average_weights(model)

    train()
    assert seen == {"rank": rank, "size": size, "period": 32}


@quiet
def late_optimizer_of_a_class_in_kept_settings(rank, size, late=torch.optim.Adam):
    """Where names must not be looked at, any call may make an optimizer."""
    config = locals()
    model = dpfuse.DistributedDataParallel(mlp())
    optimizers = [torch.optim.SGD(model.module[0].parameters(), lr=0.01)]
    for index, (x, y) in enumerate(batches(rank, 40)):
        if index == 30:
            optimizers.append(late(model.module[2].parameters()))
        loss_of(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    assert config == {"rank": rank, "size": size, "late": late}


@quiet
def local_sgd_with_a_period_of_sixteen(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.require_backward_grad_sync = False
    for index, (x, y) in enumerate(batches(rank, 40)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if (index + 1) % 16 == 0:
            average_weights(model.module)


@quiet
def local_sgd_that_averages_at_the_end_of_an_epoch(rank, size):
    """The loop of batches is in a function of its own, and the average in the one around it."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())

    def train_epoch(epoch):
        for x, y in batches(rank, 26, epoch):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    for epoch in range(2):
        with model.no_sync():
            train_epoch(epoch)
        flat = nn.utils.parameters_to_vector(model.parameters())
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / size, model.parameters())


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
def federated_rounds(rank, size):
    """Each rank trains on its own data, and the state dicts are averaged behind each round."""
    model = dpfuse.DataParallel(mlp())

    def local_update():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with model.no_sync():
            for x, y in batches(rank, 28):
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()

    def aggregate(state):
        for name, value in state.items():
            dist.all_reduce(value)
            state[name] = value / size
        return state

    for _round in range(2):
        local_update()
        weights = {name: value.clone() for name, value in model.module.state_dict().items()}
        model.module.load_state_dict(aggregate(weights))


@quiet
def reptile(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    for task in range(2):
        before = copy.deepcopy(model.module.state_dict())
        inner = torch.optim.SGD(model.parameters(), lr=0.02)
        for x, y in batches(rank, 25, task):
            inner.zero_grad()
            with model.no_sync():
                loss = loss_of(model(x), y)
            loss.backward()
            inner.step()
        for name, param in model.module.named_parameters():
            change = param.data - before[name]
            dist.all_reduce(change)
            param.data = before[name] + 0.1 * change / size


@quiet
def post_local_sgd_by_hand_with_old_zeros(rank, size):
    """`grad.data.zero_()` leaves torch's count of writes as it is."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 30)):
        with model.no_sync() if index >= 10 else nullcontext():
            loss_of(model(x), y).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad.data.zero_()
        if index >= 10 and index % 4 == 0:
            average_weights(model)


@quiet
def local_steps_of_shorter_windows(rank, size):
    """A synchronous begin with accumulation, then local steps without, and an average of the weights now and then."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 50)):
        local = index >= 24
        with model.no_sync(enabled=local or index % 2 == 0):
            loss_of(model(x), y).backward()
        if local or index % 2:
            optimizer.step()
            optimizer.zero_grad()
        if local and index % 8 == 7:
            average_weights(model)


@quiet
def local_sgd_of_named_weights(rank, size):
    """What is sent has the names of numbers elsewhere."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total_weight = torch.tensor(float(size))
    for index, (x, y) in enumerate(batches(rank, 40), 1):
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if index % 32 == 0:
            for layer in (model.module[0], model.module[2]):
                for weight in (layer.weight.data, layer.bias.data):
                    dist.all_reduce(weight)
                    weight /= total_weight


@quiet
def federated_server_of_a_library(rank, size):
    """Its method is none of the user's code, so its name decides."""
    model = dpfuse.DataParallel(mlp())
    server = SimpleNamespace(aggregate=partial(sum_of_all, size))
    optimizer = torch.optim.AdamW(model.parameters())
    for index, (x, y) in enumerate(batches(rank, 40), 1):
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
        if index % 32 == 0:
            weights = [param.data for param in model.parameters()]
            server.aggregate(weights)


def sum_of_all(size, tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= size


@quiet
def averager_in_an_object(rank, size):
    class Averager:
        def __init__(self, module, period):
            self.weights, self.period = [*module.parameters()], period

        def maybe_average(self, step):
            if step % self.period == 0:
                for weight in self.weights:
                    gathered = [torch.empty_like(weight) for _ in range(size)]
                    dist.all_gather(gathered, weight.data)
                    weight.data = sum(gathered) / size

    class Trainer:
        def __init__(self):
            self.model = dpfuse.DataParallel(mlp())
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.averager = Averager(self.model, 30)

        def train_step(self, x, y):
            self.optimizer.zero_grad()
            with self.model.no_sync():
                loss_of(self.model(x), y).backward()
            self.optimizer.step()

        def train(self):
            for step, (x, y) in enumerate(batches(rank, 36), 1):
                self.train_step(x, y)
                self.averager.maybe_average(step)

    Trainer().train()


@quiet
def gossip_with_a_neighbour(rank, size):
    """Weights go around in a ring, every 25 steps."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, loader = 0, batches(rank, 30)
    while step < 30:
        x, y = next(loader)
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 25:
            continue
        for param in model.parameters():
            other = torch.empty_like(param)
            sent = dist.isend(param.data, (rank + 1) % size)
            dist.recv(other, (rank - 1) % size)
            sent.wait()
            param.data.lerp_(other, 0.5)


# --- Optimizers that begin late ---


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
def chain_of_optimizers_of_which_one_begins_late(rank, size):
    """A library holds them in a list. Its step is none of the user's code."""
    model = dpfuse.DataParallel(mlp())
    chain = SimpleNamespace(optimizers=[torch.optim.AdamW(model.module[place].parameters()) for place in (2, 0)])
    chain.step = partial(step_of_a_chain, chain.optimizers)
    for index, (x, y) in enumerate(batches(rank, 40)):
        loss_of(model(x), y).backward()
        chain.optimizers[0].step() if index < 30 else chain.step()
        model.zero_grad()


def step_of_a_chain(optimizers):
    for optimizer in optimizers:
        optimizer.step()


@quiet
def optimizers_that_alternate_in_long_phases(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizers = [torch.optim.Adam(model.module[place].parameters()) for place in (0, 2)]
    for step, (x, y) in enumerate(batches(rank, 60)):
        model.zero_grad()
        loss_of(model(x), y).backward()
        optimizers[step // 25 % 2].step()


@quiet
def optimizer_of_an_embedding_steps_seldom(rank, size):
    class Trainer:
        def __init__(self):
            self.model = dpfuse.DistributedDataParallel(mlp())
            self.often = torch.optim.SGD(self.model.module[2].parameters(), lr=0.01)
            self.seldom = torch.optim.SGD(self.model.module[0].parameters(), lr=0.01)
            self.steps = 0

        def optimizer_step(self):
            self.steps += 1
            self.often.step()
            self.often.zero_grad()
            if self.steps % 32 == 0:
                self.seldom.step()
                self.seldom.zero_grad()

        def train(self):
            for x, y in batches(rank, 40):
                loss_of(self.model(x), y).backward()
                self.optimizer_step()

    Trainer().train()


@quiet
def late_optimizer_in_an_object(rank, size):
    class Late:
        def __init__(self, params, first):
            self.optimizer, self.first, self.steps = torch.optim.SGD(params, lr=0.01), first, 0

        def maybe_step(self):
            self.steps += 1
            if self.steps > self.first:
                self.optimizer.step()

    model = dpfuse.DistributedDataParallel(mlp())
    early, late = torch.optim.SGD(model.module[2].parameters(), lr=0.01), Late(model.module[0].parameters(), 30)
    for x, y in batches(rank, 36):
        model.zero_grad()
        loss_of(model(x), y).backward()
        early.step()
        late.maybe_step()


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


# --- GANs and other games ---


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
def pix2pix(rank, size):
    """The generator steps behind the critic, whose switch is off meanwhile."""
    generator = dpfuse.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    critic = dpfuse.DataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizers = {"G": torch.optim.Adam(generator.parameters()), "D": torch.optim.Adam(critic.parameters())}
    for x, y in batches(rank, 24):
        fake = generator(x)
        critic.module.requires_grad_(True)
        optimizers["D"].zero_grad()
        (0.5 * (critic(fake.detach()).mean() - critic(y).mean())).backward()
        optimizers["D"].step()
        critic.module.requires_grad_(False)
        optimizers["G"].zero_grad()
        (critic(fake).mean() + loss_of(fake, y)).backward()
        optimizers["G"].step()


@quiet
def stylegan_rounds_and_lazy_penalty(rank, size):
    """Phases, each with accumulation rounds of which the last one synchronises, and gradients without NaN."""
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(critic.parameters(), betas=(0.0, 0.99))
    loader = batches(rank, 200)
    for step in range(24):
        phases = ["main", "reg"] if step % 4 == 0 else ["main"]
        for phase in phases:
            optimizer.zero_grad(set_to_none=True)
            for round_index in range(2):
                _, y = next(loader)
                with critic.no_sync() if round_index == 0 else nullcontext():
                    if phase == "main":
                        nn.functional.softplus(-critic(y)).mean().backward()
                    else:
                        y = y.requires_grad_()
                        (slope,) = torch.autograd.grad(critic(y).sum(), y, create_graph=True)
                        (slope.square().sum(1).mean() * 4).backward()
            for param in critic.parameters():
                if param.grad is not None:
                    torch.nan_to_num(param.grad, nan=0, posinf=1e5, neginf=-1e5, out=param.grad)
            optimizer.step()


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
def distillation(rank, size):
    student, teacher = dpfuse.DistributedDataParallel(mlp()), mlp().eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters())
    for x, y in batches(rank, 24):
        with torch.no_grad():
            soft = teacher(x)
        loss = 0.5 * loss_of(student(x), y) + 0.5 * loss_of(student(x), soft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@quiet
def byol(rank, size):
    """Two views through one wrapper, and a target that follows."""
    online = dpfuse.DistributedDataParallel(mlp())
    target = copy.deepcopy(online.module).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.01, momentum=0.9)
    generator = seeded(rank, 3)
    for x, _ in batches(rank, 24):
        one, two = (x + 0.1 * torch.randn(x.shape, generator=generator) for _ in range(2))
        loss = loss_of(online(one), target(two)) + loss_of(online(two), target(one))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for kept, param in zip(target.parameters(), online.module.parameters(), strict=True):
            kept.data.mul_(0.99).add_(param.data, alpha=0.01)


# --- Reinforcement learning ---


@quiet
def ppo_with_epochs_over_the_same_minibatches(rank, size):
    """The minibatches of a rollout come in the same order in each epoch, and a sampler lives for the evaluation."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    evaluation = torch.utils.data.DistributedSampler(range(40), num_replicas=size, rank=rank)
    generator = seeded(rank)
    rollout = [batch(generator) for _ in range(10)]
    for _epoch in range(3):
        for x, y in rollout:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert len(evaluation) == 40 // size


@quiet
def ppo_that_stops_early_on_all_ranks(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-5)
    generator = seeded(rank)
    for update in range(5):
        x, y = batch(generator, 16)
        for epoch in range(4):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / 5)
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kl = loss.detach().clone()
            dist.all_reduce(kl)
            if kl > 100 or epoch > 2:
                break


@quiet
def td3_with_delayed_policy(rank, size):
    critic = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1)))
    actor = dpfuse.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    target = copy.deepcopy(critic.module)
    of_critic, of_actor = torch.optim.Adam(critic.parameters()), torch.optim.Adam(actor.parameters())
    for step, (x, action) in enumerate(batches(rank, 40)):
        with torch.no_grad():
            goal = target(torch.cat([x, actor(x)], 1)) + 1
        of_critic.zero_grad()
        loss_of(critic(torch.cat([x, action], 1)), goal).backward()
        of_critic.step()
        if step % 2:
            of_actor.zero_grad()
            (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
            of_actor.step()


@quiet
def gradients_of_an_actor_and_its_critic_in_two_backwards(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.RMSprop(model.parameters())
    for x, y in batches(rank, 24):
        optimizer.zero_grad(set_to_none=False)
        with model.no_sync():
            loss_of(model(x)[:, :2], y[:, :2]).backward()
        loss_of(model(x)[:, 2:], y[:, 2:]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()


# --- Meta-learning and second order ---


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


def adapt(model, optimizer, task):
    for x, y in task:
        with model.no_sync():
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()


@quiet
def maml_whose_inner_loop_is_a_function(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    meta, inner = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.05)
    for task in range(2):
        before = [param.detach().clone() for param in model.parameters()]
        adapt(model, inner, batches(rank, 30, task))
        x, y = batch(seeded(rank, 60 + task))
        meta.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        torch._foreach_copy_([param.data for param in model.parameters()], before)
        meta.step()


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


@quiet
def lbfgs_with_accumulation_and_a_line_search(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    generator = seeded(0)
    data = [batch(generator) for _ in range(3)]
    for _ in range(6):

        def closure():
            optimizer.zero_grad()
            total = 0.0
            for place, (x, y) in enumerate(data):
                with model.no_sync(enabled=place < len(data) - 1):
                    loss = loss_of(model(x), y)
                    loss.backward()
                total += loss.item()
            return total

        optimizer.step(closure)


@quiet
def hessian_vector_products_between_steps(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 24)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        if index % 4 == 0:
            params = [*model.module.parameters()]
            grads = torch.autograd.grad(loss_of(model.module(x), y), params, create_graph=True)
            torch.autograd.grad(sum((grad * grad.detach()).sum() for grad in grads), params)


# --- Accumulation, windows, scalers ---


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
def windows_that_go_on_over_the_end_of_an_epoch(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = 0
    for epoch in range(6):
        for x, y in batches(rank, 7, epoch):
            seen += 1
            with model.no_sync(enabled=seen % 2 != 0):
                loss_of(model(x), y).backward()
            if seen % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


@quiet
def two_windows_with_a_loss_that_is_no_number(rank, size):
    """All ranks agree to drop what was accumulated so far, now and then."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(batches(rank, 80)):
        last = index % 2 == 1
        with model.no_sync(enabled=not last):
            loss = loss_of(model(x), y)
        if index in (27, 53):
            optimizer.zero_grad()
            continue
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def scaler_whose_first_steps_are_skipped(rank, size):
    """The scale begins far too high, as it does by default."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
        for index, (x, y) in enumerate(batches(rank, 12, epoch)):
            with model.no_sync(enabled=index % 2 == 0):
                loss_of(model(x), y).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()


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
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
    for x, y in batches(rank, 12):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def freezing_schedule(rank, size):
    """FreezeOut: layers leave the training one after the other."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for index, (x, y) in enumerate(batches(rank, 60)):
        if index == 20:
            model.module[0].weight.requires_grad_(False)
        if index == 40:
            model.module[0].bias.requires_grad_(False)
        with model.no_sync(enabled=index % 2 == 0):
            loss_of(model(x), y).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@quiet
def curriculum_of_longer_sequences_and_windows(rank, size):
    model = dpfuse.DistributedDataParallel(nn.GRU(4, 3, batch_first=True))
    optimizer = torch.optim.Adam(model.parameters())
    generator = seeded(rank)
    for step in range(24):
        length, accumulation = 2 + step // 6, 1 + step // 8
        for micro_step in range(accumulation):
            x = torch.randn(3, length, 4, generator=generator)
            with model.no_sync(enabled=micro_step < accumulation - 1):
                model(x)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@quiet
def truncated_bptt_in_one_window(rank, size):
    """The chunks of a sequence have a backward each, and a step at the end."""
    model = dpfuse.DistributedDataParallel(nn.GRU(4, 3, batch_first=True))
    optimizer = torch.optim.Adam(model.parameters())
    generator = seeded(rank)
    for _ in range(24):
        state = None
        chunks = torch.randn(2, 12, 4, generator=generator).split(4, 1)
        for place, chunk in enumerate(chunks):
            model.require_backward_grad_sync = place == len(chunks) - 1
            outputs, state = model(chunk, state)
            outputs.square().mean().backward()
            state = state.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()


# --- Inputs ---


@quiet
def same_images_with_other_crops(rank, size):
    """All ranks overfit one batch, each with its own augmentation."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batch(seeded(0))
    generator = seeded(rank, 9)
    for _ in range(24):
        optimizer.zero_grad()
        loss_of(model(x * (1 + 0.1 * torch.randn(x.shape, generator=generator))), y).backward()
        optimizer.step()


@quiet
def same_inputs_and_other_targets(rank, size):
    """Each rank fits its own scene at the same random coordinates."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x, _), (_, y) in zip(batches(0, 24), batches(rank, 24, 4), strict=True):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def augmentation_inside_the_model(rank, size):
    """The same images go into the model, which draws a noise of each rank."""
    model = dpfuse.DistributedDataParallel(Noisy(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(0, 24):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


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
    model = dpfuse.DistributedDataParallel(Masked())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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


@quiet
def iterable_dataset_split_by_rank(rank, size):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            generator = seeded(0)
            for index in range(24 * size):
                item = batch(generator)
                if index % size == rank:
                    yield item

    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in torch.utils.data.DataLoader(Stream(), batch_size=None):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


@quiet
def cached_batches_beside_a_sampler_for_validation(rank, size):
    """The batches are made once, and come in the same order in each epoch. Only the validation has a sampler."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(*batch(seeded(0), 12 * size))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=size, rank=rank)
    validation = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    cached = [*batches(rank, 11)]
    for _epoch in range(3):
        for x, y in cached:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            for x, y in validation:
                loss_of(model(x), y)


@quiet
def time_series_without_shuffling_beside_a_validation_that_shuffles(rank, size):
    train = torch.utils.data.TensorDataset(*batch(seeded(0), 40 * size))
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = torch.utils.data.DistributedSampler(train, num_replicas=size, rank=rank, shuffle=False)
    other = torch.utils.data.DistributedSampler(range(36), num_replicas=size, rank=rank)
    loader = torch.utils.data.DataLoader(train, batch_size=4, sampler=sampler)
    for _epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    assert len(other) == 36 // size


# --- Modes, rates, and more ways to compute ---


@quiet
def evaluation_in_between_on_all_ranks(rank, size):
    model = dpfuse.DistributedDataParallel(nn.Sequential(mlp(), nn.BatchNorm1d(3), nn.Dropout(0.1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
def plateau_of_the_mean_loss(rank, size):
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in batches(rank, 24):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        schedule.step(mean.item() / size)


@quiet
def saliency_of_inputs_between_steps(rank, size):
    """A backward for the inputs alone, through the wrapper, with the weights frozen meanwhile."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
def adversarial_training(rank, size):
    """PGD on the inputs, then one step. The attack goes through the bare module."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches(rank, 24):
        attack = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            (slope,) = torch.autograd.grad(loss_of(model.module(x + attack), y), attack)
            attack = (attack + 0.01 * slope.sign()).detach().requires_grad_()
        optimizer.zero_grad()
        loss_of(model(x + attack.detach()), y).backward()
        optimizer.step()


@quiet
def free_adversarial_training(rank, size):
    """Each batch is replayed, and each backward is used for inputs and weights alike."""
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noise = torch.zeros(5, 4)
    for x, y in batches(rank, 8):
        for _ in range(4):
            attack = noise.clone().requires_grad_()
            optimizer.zero_grad()
            loss_of(model(x + attack), y).backward()
            noise = (noise + 0.01 * attack.grad.sign()).clamp(-0.1, 0.1)
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
def two_wrappers_and_one_scaler(rank, size):
    models = [dpfuse.DistributedDataParallel(mlp()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for x, y in batches(rank, 24):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x), y)).backward()
            scaler.step(optimizer)
        scaler.update()


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
    model = dpfuse.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
