"""Programs that are right: their weights are equal on all ranks whenever that matters. Nothing may be told of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, RMSprop, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import dpfuse

__all__ = ["PROGRAMS", "Program"]

STEPS = 140  # more than two passes over all weights
Program = Callable[[int, int], Any]
PROGRAMS: dict[str, Program] = {}


def right(program: Program) -> Program:
    """Add a program to the list, under its name."""
    PROGRAMS[program.__name__.replace("_", " ")] = program
    return program


def network(**kind: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16, **kind), nn.Tanh(), nn.Linear(16, 8, **kind), nn.Tanh(), nn.Linear(8, 2, **kind)
    )


def deep_network() -> nn.Sequential:
    """So many parameters that several slices are hashed in a pass."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *[nn.Linear(8, 8) for _ in range(30)], nn.Linear(8, 2))


def batches(rank: int, steps: int = STEPS) -> Iterator[Tensor]:
    """Other inputs on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield torch.randn(4, 6, generator=generator)


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def sgd(model: nn.Module, **options: Any) -> SGD:
    return SGD(model.parameters(), lr=0.05, **options)


def nothing(*_: Any) -> None:
    """What most programs do beside a step."""


def train(
    model: Any,
    optimizer: Optimizer,
    rank: int,
    steps: int = STEPS,
    *,
    prepare: Callable[[Tensor], Any] = lambda inputs: inputs,
    before: Callable[[], object] = nothing,
    after: Callable[[int, Tensor], object] = nothing,
) -> None:
    """Train on the `prepare`d inputs. `before` is called before each step of the optimizer, and `after` after it."""
    for step, inputs in enumerate(batches(rank, steps)):
        loss_of(model(prepare(inputs))).backward()
        before()
        optimizer.step()
        optimizer.zero_grad()
        after(step, inputs)


def train_in_windows(model: Any, optimizer: Optimizer, inputs: Iterable[Tensor], length: int = 2) -> None:
    """Accumulate over so many batches, of which the last one synchronises."""
    for index, batch in enumerate(inputs):
        is_last = index % length == length - 1
        with model.no_sync(enabled=not is_last):
            loss_of(model(batch)).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def average(params: Iterable[Tensor], size: int) -> None:
    for param in params:
        dist.all_reduce(param.data)
        param.data /= size


@right
def private_gradients_and_a_schedule(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network(), gradient_as_bucket_view=False)
    optimizer = RMSprop(model.parameters(), lr=0.01)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    train(model, optimizer, rank, after=lambda *_: schedule.step())


@right
def l_bfgs(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for inputs in batches(rank, 40):

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(inputs))
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)  # else the line search would differ between ranks
            return total / size

        optimizer.step(closure)


@right
def batch_normalization_with_statistics_of_each_rank(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(with_batch_normalization())
    train(model, sgd(model), rank)
    mean = model.module[1].running_mean
    first = mean.clone()
    dist.broadcast(first, 0)
    assert rank == 0 or not torch.equal(first, mean), "the statistics do differ"


@right
def sharpness_aware_minimisation_on_each_rank(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer = sgd(model)
    for inputs in batches(rank):
        with model.no_sync():
            loss_of(model(inputs)).backward()
        climbed = [0.05 * param.grad / (param.grad.norm() + 1e-12) for param in model.parameters()]
        with torch.no_grad():
            for param, way in zip(model.parameters(), climbed, strict=True):
                param.add_(way)
        optimizer.zero_grad()
        loss_of(model(inputs)).backward()
        with torch.no_grad():
            for param, way in zip(model.parameters(), climbed, strict=True):
                param.sub_(way)
        average(model.parameters(), size)  # the way back is rounded otherwise on each rank
        optimizer.step()
        optimizer.zero_grad()


@right
def sharpness_aware_minimisation_that_restores_copies(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer = sgd(model)
    for inputs in batches(rank):
        kept = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.01 * (rank + 1))
        loss_of(model(inputs)).backward()
        with torch.no_grad():
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
        optimizer.step()
        optimizer.zero_grad()


@right
def first_order_maml_on_the_weights_themselves(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    outer = SGD(model.parameters(), lr=0.05)
    for inputs in batches(rank):
        kept = [param.detach().clone() for param in model.parameters()]
        inner = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with model.no_sync():
                inner.zero_grad()
                loss_of(model(inputs)).backward()
            inner.step()
        outer.zero_grad()
        loss_of(model(inputs + 1)).backward()  # averaged, where each rank has gone to
        with torch.no_grad():
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
        outer.step()


@right
def reptile_whose_way_is_averaged_by_hand(rank: int, size: int) -> None:
    model = network()
    params, outer = list(model.parameters()), SGD(model.parameters(), lr=0.5)
    for inputs in batches(rank):
        kept, inner = copy.deepcopy(model.state_dict()), Adam(params)
        for _ in range(3):
            inner.zero_grad()
            loss_of(model(inputs)).backward()
            inner.step()
        for name, param in model.named_parameters():
            param.grad = kept[name] - param.detach()
        dpfuse.fused_allreduce_gradients(params)
        model.load_state_dict(kept)
        outer.step()


@right
def gradients_of_an_inner_loop_put_into_grad(rank: int, size: int) -> None:
    """No backward writes them, so only the order of steps tells what they are."""
    model = dpfuse.DistributedDataParallel(network())
    outer, inner = Adam(model.parameters(), lr=0.01), SGD(model.parameters(), lr=0.1)
    for inputs in batches(rank):
        kept = [param.detach().clone() for param in model.parameters()]
        for _ in range(3):
            params = list(model.parameters())
            for param, grad in zip(params, torch.autograd.grad(loss_of(model.module(inputs)), params), strict=True):
                param.grad = grad
            inner.step()
        model.zero_grad()
        loss_of(model(-inputs)).backward()
        torch._foreach_copy_([param.data for param in model.parameters()], kept)
        outer.step()


@right
def weights_that_are_averaged_behind_each_step_on_an_average(rank: int, size: int) -> None:
    """The steps in between are local, so weights are equal when the first of them begins, and at no average."""
    model = dpfuse.DataParallel(network())
    optimizer = sgd(model)
    for step, inputs in enumerate(batches(rank, 3 * STEPS)):
        with model.no_sync(enabled=step % 3 != 2):
            loss_of(model(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            average(model.parameters(), size)


@right
def two_networks_that_play_against_each_other(rank: int, size: int) -> None:
    made, judged = dpfuse.DataParallel(network()), dpfuse.DataParallel(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1)))
    makes, judges = Adam(made.parameters()), SGD(judged.parameters(), lr=0.01)
    for inputs in batches(rank):
        judges.zero_grad()
        (judged(made(inputs).detach()).mean() - judged(inputs[:, :2]).mean()).backward()
        judges.step()
        makes.zero_grad()
        judged.module.requires_grad_(False)
        (-judged.module(made(inputs)).mean()).backward()
        judged.module.requires_grad_(True)
        makes.step()


@right
def two_optimizers_of_one_model(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    first, second = SGD(model.module[0].parameters(), lr=0.05), Adam(model.module[2:].parameters())
    for step, inputs in enumerate(batches(rank)):
        loss_of(model(inputs)).backward()
        first.step()
        if step % 3 == 0:
            second.step()
        model.zero_grad()


@right
def a_moving_average_that_is_evaluated(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    average_of = AveragedModel(model.module)

    def look(step: int, inputs: Tensor) -> None:
        average_of.update_parameters(model.module)
        if rank == 0 and step % 20 == 0:  # only one rank looks at the average, in the model's own memory
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(average_of.module.state_dict())
            with torch.no_grad():
                model.module(inputs)
            model.module.load_state_dict(kept)

    train(model, sgd(model), rank, after=look)


@right
def local_steps_that_are_averaged(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer = sgd(model)
    for step, inputs in enumerate(batches(rank, 2 * STEPS)):
        with model.no_sync(enabled=step % 4 != 0):
            loss_of(model(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            average(model.parameters(), size)


@right
def torchs_periodic_averager(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(network())
    optimizer, averager = SGD(model.parameters(), lr=0.05), PeriodicModelAverager(period=4, warmup_steps=20)
    for step, inputs in enumerate(batches(rank)):
        with model.no_sync(enabled=step >= 20):
            loss_of(model(inputs)).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        optimizer.zero_grad()


@right
def weights_that_are_averaged_behind_each_step(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network(), check_training="log")  # which names rates that differ
    optimizer = SGD(model.parameters(), lr=0.05 * (rank + 1))  # each rank explores at its own rate
    train(model, optimizer, rank, after=lambda *_: average_parameters(model.parameters(), dist.group.WORLD))


@right
def noise_of_each_rank_without_the_check(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network(), check_training="off")

    @torch.no_grad()
    def add_noise(*_: Any) -> None:
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 1e-3 * (rank + 1))

    train(model, sgd(model), rank, after=add_noise)


@right
def a_step_that_only_decays(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer = SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    for step, inputs in enumerate(batches(rank)):
        if step % 2:
            loss_of(model(inputs)).backward()
        else:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()


@right
def parameters_to_ignore(rank: int, size: int) -> None:
    module = network()
    dpfuse.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["4.weight", "4.bias"])
    model = dpfuse.DistributedDataParallel(module)
    train(model, sgd(model), rank)


@right
def uneven_inputs_with_join(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(network())
    optimizer = sgd(model)
    for _ in range(3):
        with model.join():
            train(model, optimizer, rank, 30 + 5 * rank)


@right
def epochs_of_uneven_length_with_a_join_for_each(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(deep_network())
    optimizer = sgd(model)
    for _ in range(6):
        with model.join():
            train(model, optimizer, rank, 20 + 5 * rank)
    assert not model._sync.weights.off, "ranks hash the same slices again after each"


@right
def windows_of_uneven_epochs_with_join(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(deep_network())
    optimizer = sgd(model)
    for epoch in range(5):
        with model.join():
            train_in_windows(model, optimizer, batches(rank, 24 + 4 * ((rank + epoch) % size)))
    assert not model._sync.weights.off


@right
def a_deep_copy_that_is_trained_too(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    train(model, sgd(model), rank, 40)
    other = copy.deepcopy(model)
    train(other, Adam(other.parameters()), rank)
    train(model, sgd(model), rank)


@right
def states_that_all_ranks_load(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer, kept = SGD(model.parameters(), lr=0.05), copy.deepcopy(model.state_dict())
    for _ in range(4):
        train(model, optimizer, rank, 35)
        model.load_state_dict(kept)


@right
def accumulation_with_and_without_no_sync(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer = sgd(model)
    for step, inputs in enumerate(batches(rank, 2 * STEPS)):
        with model.no_sync(enabled=step % 2 == 0 and step < STEPS):
            loss_of(model(inputs)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@right
def accumulation_in_the_buckets(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network(), accumulate_in_buckets=True)
    train_in_windows(model, sgd(model), batches(rank))


@right
def layers_that_freeze_and_thaw(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer = sgd(model)
    for frozen in (True, False, True, False):
        model.module[2].requires_grad_(not frozen)
        train(model, optimizer, rank, 40)


@right
def several_models_and_one_optimizer(rank: int, size: int) -> None:
    models = [dpfuse.DataParallel(network()) for _ in range(3)]
    optimizer = SGD([param for model in models for param in model.parameters()], lr=0.05)
    for inputs in batches(rank):
        sum(loss_of(model(inputs)) for model in models).backward()
        optimizer.step()
        optimizer.zero_grad()


@right
def a_compiled_model(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, SGD(model.parameters(), lr=0.05), rank)
    torch._dynamo.reset()


@right
def sixteen_bits(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network(dtype=torch.bfloat16))
    train(model, sgd(model), rank, prepare=Tensor.bfloat16)


@right
def float64_and_complex_numbers(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(6, 4, dtype=torch.complex64), Modulus()))
    train(model, sgd(model), rank, prepare=lambda inputs: inputs.to(torch.complex64))


@right
def owners_that_send_their_weights_behind_the_step(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    params = list(model.parameters())
    optimizer = SGD(params[rank::size], lr=0.05)
    for inputs in batches(rank):
        loss_of(model(inputs)).backward()
        optimizer.step()
        for place, param in enumerate(params):
            dist.broadcast(param.data, place % size)
        model.zero_grad()


@right
def one_rank_that_steps_and_sends(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer = sgd(model)
    for inputs in batches(rank):
        loss_of(model(inputs)).backward()
        if rank == 0:
            optimizer.step()
        for param in model.parameters():
            dist.broadcast(param.data, 0)
        model.zero_grad()


@right
def a_loss_scale_that_skips_steps(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizer, scaler = SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, inputs in enumerate(batches(rank)):
        inputs = inputs * float("inf") if step % 10 == 3 and rank == 0 else inputs
        scaler.scale(loss_of(model(inputs))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@right
def clipping_on_all_ranks(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    train(model, sgd(model), rank, before=lambda: model.clip_grad_norm_(0.1))


@right
def data_that_are_replaced_on_all_ranks(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())

    def replace(step: int, _: Tensor) -> None:
        if step % 7 == 0:
            for param in model.parameters():
                param.data = param.data.clone()

    train(model, sgd(model), rank, after=replace)


@right
def weights_that_rest_elsewhere_between_steps(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())

    def rest(*_: Any) -> None:
        kept = [param.data for param in model.parameters()]
        for param in model.parameters():
            param.data = torch.empty(0)
        for param, data in zip(model.parameters(), kept, strict=True):
            param.data = data

    train(model, sgd(model), rank, after=rest)


@right
def a_model_that_is_converted(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    train(model, sgd(model), rank, 30)
    model.double()
    train(model, sgd(model), rank, prepare=Tensor.double)


@right
def another_memory_format_of_a_frozen_layer_on_one_rank(rank: int, size: int) -> None:
    torch.manual_seed(0)
    frozen = nn.Conv2d(24, 24, 3).requires_grad_(False)  # a small one would be hashed in the order of its indices
    model = dpfuse.DataParallel(nn.Sequential(frozen, nn.Flatten(), nn.Linear(96, 2)))
    if rank == 0:
        model.module[0].weight.data = model.module[0].weight.data.contiguous(memory_format=torch.channels_last)
    train(model, sgd(model), rank, prepare=lambda inputs: inputs.repeat(1, 64).view(4, 24, 4, 4))


@right
def layers_that_only_some_ranks_use(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(nn.ModuleList([nn.Linear(6, 2) for _ in range(3)]), find_unused_parameters=True)
    model.module.forward = lambda inputs: sum(  # type: ignore[method-assign]
        layer(inputs) for place, layer in enumerate(model.module) if place % 2 == 0 or rank
    )
    train(model, sgd(model), rank)


@right
def sparse_gradients(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(nn.Sequential(nn.Embedding(50, 6, sparse=True)))
    optimizer = SparseAdam(list(model.parameters()), lr=0.01)
    train(model, optimizer, rank, prepare=lambda inputs: (inputs.abs() * 20).long().clamp(max=49))


@right
def a_communication_hook(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(network())
    model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    train(model, sgd(model), rank)


@right
def one_optimizer_for_each_parameter_inside_backward(rank: int, size: int) -> None:
    model = dpfuse.DistributedDataParallel(network())
    optimizers = {param: SGD([param], lr=0.0) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
    for inputs in batches(rank):
        loss_of(model(inputs)).backward()
        model.zero_grad()


@right
def torchs_optimizers_in_backward(rank: int, size: int) -> None:
    module = network()
    _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.05, "momentum": 0.9})
    model = dpfuse.DistributedDataParallel(module)
    for inputs in batches(rank):
        loss_of(model(inputs)).backward()


@right
def steps_inside_backward_whose_weights_are_averaged_behind_it(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    optimizers = {param: SGD([param], lr=0.01) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
    for inputs in batches(rank):
        loss_of(model(inputs)).backward()
        model.zero_grad()
        average(model.parameters(), size)


@right
def activation_checkpoints_and_dropout(rank: int, size: int) -> None:
    module = nn.Sequential(network(), nn.Dropout(0.5))
    torch.manual_seed(rank)
    model = dpfuse.DataParallel(module)
    optimizer = sgd(model)
    model.module.forward = lambda inputs: module[1](checkpoint(module[0], inputs, use_reentrant=False))  # type: ignore
    train(model, optimizer, rank)


class Holder(nn.Module):
    """A network that may get further modules, which its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) + (self.adapter(inputs) if hasattr(self, "adapter") else 0.0)


@right
def a_frozen_metric_that_rank_0_makes_when_it_evaluates(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(Holder())
    optimizer = sgd(model)
    for _ in range(3):
        train(model, optimizer, rank, 50)
        if rank == 0 and not hasattr(model.module, "lpips"):
            model.module.lpips = nn.Conv2d(3, 4, 3).requires_grad_(False)
    assert not model._sync.weights.off


@right
def a_frozen_average_inside_the_model_of_one_rank(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(Holder())

    @torch.no_grad()
    def follow(step: int, _: Tensor) -> None:
        if rank == size - 1 and step == 10:
            model.module.ema = copy.deepcopy(model.module.net).requires_grad_(False)
        if hasattr(model.module, "ema"):
            for kept, param in zip(model.module.ema.parameters(), model.module.net.parameters(), strict=True):
                kept.lerp_(param, 0.1)

    train(model, Adam(model.parameters()), rank, after=follow)
    assert not model._sync.weights.off


@right
def an_adapter_that_all_ranks_add_and_freeze_again(rank: int, size: int) -> None:
    """LoRA's way: the network is frozen, then the adapter is. Rank 0 alone adds something else at last."""
    model = dpfuse.DataParallel(Holder())
    train(model, sgd(model), rank, 40)
    torch.manual_seed(1)
    model.module.adapter = nn.Linear(6, 2)
    model.module.net.requires_grad_(False)
    train(model, SGD(model.module.adapter.parameters(), lr=0.05), rank, 40)
    model.module.adapter.requires_grad_(False)
    model.module.net.requires_grad_(True)
    optimizer = SGD(model.module.net.parameters(), lr=0.05)
    train(model, optimizer, rank, 20)
    if rank == 0:
        model.module.metric = nn.Linear(3, 3).requires_grad_(False)
    train(model, optimizer, rank)
    assert not model._sync.weights.off


@right
def evaluation_on_one_rank(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())

    def evaluate(step: int, inputs: Tensor) -> None:
        if rank == 0 and step % 10 == 0:
            with torch.no_grad():
                model.eval()(inputs)
            model.train()

    train(model, sgd(model), rank, after=evaluate)


@right
def updates_by_hand(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    for inputs in batches(rank):
        loss_of(model(inputs)).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.05 * param.grad
        model.zero_grad()


@right
def a_deterministic_sum_with_weights(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network(), deterministic=True)
    optimizer = sgd(model)
    for inputs in batches(rank):
        model.set_gradient_weight(rank + 1.0)
        loss_of(model(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()


@right
def a_weight_that_is_normalized_on_all_ranks(rank: int, size: int) -> None:
    model = dpfuse.DataParallel(network())
    weight = model.module[0].weight

    @torch.no_grad()
    def normalize(*_: Any) -> None:
        weight.div_(weight.norm(dim=1, keepdim=True))

    train(model, sgd(model), rank, after=normalize)


class Modulus(nn.Module):
    """Real numbers of complex ones."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.abs()


def of_three_layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)])


def with_batch_normalization() -> nn.Sequential:
    return nn.Sequential(network()[0], nn.BatchNorm1d(16), network()[2])


def with_spectral_normalization() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2)))


def with_a_shared_parameter() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    module[2].weight = module[0].weight
    return module


def sharded(optimizer: type[Optimizer] = AdamW, **options: Any) -> Callable[[Any], Any]:
    return lambda model: dpfuse.ShardedOptimizer(model, optimizer, lr=0.01, **options)


def zero_redundancy(model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=0.01)


PADDLE, TORCH = dpfuse.DataParallel, dpfuse.DistributedDataParallel
# Plain loops: the wrapper, the network, the optimizer, and options of the wrapper.
PLAIN: dict[str, tuple[Any, Callable[[], nn.Module], Callable[[Any], Any], dict[str, Any]]] = {
    "stochastic gradient descent": (PADDLE, network, partial(sgd, momentum=0.9, nesterov=True), {}),
    "adam with amsgrad and foreach": (
        PADDLE, network, lambda model: Adam(model.parameters(), amsgrad=True, foreach=True), {},
    ),
    "fused adamw": (TORCH, network, lambda model: AdamW(model.parameters(), fused=True), {}),
    "batch normalization with statistics of rank 0": (TORCH, with_batch_normalization, sgd, {}),
    "shared parameters": (PADDLE, with_a_shared_parameter, lambda model: Adam(model.parameters()), {}),
    "spectral normalization": (PADDLE, with_spectral_normalization, sgd, {}),
    "a narrow wire with error feedback": (
        PADDLE, network, sgd, {"wire_dtype": torch.bfloat16, "error_feedback": True},
    ),
    "a sharded optimizer": (PADDLE, network, sharded(), {}),
    "a step in backward": (PADDLE, network, sharded(step_in_backward=True), {}),
    "owners of whole tensors": (PADDLE, of_three_layers, sharded(torch.optim.Muon), {}),
    "torchs zero redundancy optimizer": (TORCH, network, zero_redundancy, {"gradient_as_bucket_view": True}),
}  # fmt: skip


def plainly(rank: int, size: int, *, name: str) -> None:
    """Run one of the plain loops."""
    wrap, build, optimizer, options = PLAIN[name]
    model = wrap(build(), **options)
    train(model, optimizer(model), rank)


PROGRAMS |= {name: partial(plainly, name=name) for name in PLAIN}


def run(rank: int, size: int, name: str) -> list[str]:
    """Run a right program, and return the warnings of dpfuse that it got."""
    return run_program(PROGRAMS[name], rank, size)


def run_program(program: Program, rank: int, size: int) -> list[str]:
    """Run a program, and return the warnings of dpfuse that it got."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(rank, size)
    return [str(each.message) for each in caught if isinstance(each.message, dpfuse.DPFuseWarning)]
