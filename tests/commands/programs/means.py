"""Programs that take means over ranks by hand, wrong and right ones: `means.py NAME`; with `ours`, by our class."""

import torch
import torch.distributed as dist
from torch import nn
from training import batches, loss_of, net, run, seeded, trained

import dpfuse

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def each_step(model, optimizer, between):
    """Train, and call `between` after each backward."""
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        between()
        optimizer.step()


# --- Of gradients that the backward has averaged; "here" is the line that is named ---


@program
def mean_taken_again(rank, size):
    model, optimizer = trained()

    def between():
        for param in model.parameters():
            dist.all_reduce(param.grad)  # here
            param.grad /= size

    each_step(model, optimizer, between)


@program
def mean_of_divided_gradients_taken_again(rank, size):
    model, optimizer = trained()

    def between():
        waiting = []
        for param in model.parameters():
            param.grad /= size
            waiting.append(dist.all_reduce(param.grad, async_op=True))  # here
        for one in waiting:
            one.wait()

    each_step(model, optimizer, between)


@program
def sum_taken_again_of_flat_gradients(rank, size):
    model, optimizer = trained(0.001)
    params = [*model.parameters()]

    def between():
        flat = torch.cat([param.grad.flatten() for param in params])
        dist.all_reduce(flat)  # here
        torch.nn.utils.vector_to_parameters(flat, [param.grad for param in params])

    each_step(model, optimizer, between)


@program
def mean_taken_again_in_fused_buffers(rank, size):
    model, optimizer = trained()
    each_step(model, optimizer, lambda: dpfuse.fused_allreduce_gradients(model.parameters()))  # here


@program
def mean_taken_again_of_gathered_gradients(rank, size):
    model, optimizer = trained()

    def between():
        for param in model.parameters():
            of_ranks = [torch.empty_like(param.grad) for _ in range(size)]
            dist.all_gather(of_ranks, param.grad)  # here
            param.grad = torch.stack(of_ranks).mean(0)

    each_step(model, optimizer, between)


@program
def mean_taken_again_of_a_gathered_tensor(rank, size):
    model, optimizer = trained()

    def between():
        for param in model.parameters():
            of_ranks = torch.empty(size * param.grad.numel())
            dist.all_gather_into_tensor(of_ranks, param.grad.flatten())  # here
            param.grad.copy_(of_ranks.view(size, *param.grad.shape).mean(0))

    each_step(model, optimizer, between)


@program
def mean_taken_again_on_rank_0_and_sent(rank, size):
    model, optimizer = trained()

    def between():
        for param in model.parameters():
            dist.reduce(param.grad, 0)
            if rank == 0:
                param.grad /= size
            dist.broadcast(param.grad, 0)  # here

    each_step(model, optimizer, between)


# --- Of something else ---


@program
def mean_of_losses_and_metrics(rank, size):
    model, optimizer = trained()
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        dist.all_gather([torch.empty(1) for _ in range(size)], torch.tensor([y.mean()]))
        dist.reduce(mean, 0)
        dist.broadcast(mean, 0)
        optimizer.step()


@program
def gradients_compared_and_scaled(rank, size):
    """Each step looks whether the ranks have the same gradients, and then makes them smaller by hand."""
    model, optimizer = trained()

    def between():
        for param in model.parameters():
            of_ranks = [torch.empty_like(param.grad) for _ in range(size)]
            dist.all_gather(of_ranks, param.grad)
            assert all(torch.equal(one, param.grad) for one in of_ranks)
            param.grad.mul_(0.5)

    each_step(model, optimizer, between)


@program
def flat_gradients_added_up_for_a_log(rank, size):
    model, optimizer = trained()

    def between():
        flat = torch.cat([param.grad.flatten() for param in model.parameters()])
        dist.all_reduce(flat)
        assert flat.norm() >= 0

    each_step(model, optimizer, between)


@program
def noise_of_each_rank_averaged(rank, size):
    """Each rank adds noise of its own to the averaged gradients, so these are to be averaged again."""
    model, optimizer = trained()
    generator = seeded(rank)

    def between():
        for param in model.parameters():
            param.grad += 0.1 * torch.randn(param.shape, generator=generator)
            dist.all_reduce(param.grad)
            param.grad /= size

    each_step(model, optimizer, between)


@program
def head_that_no_wrapper_has(rank, size):
    """The optimizer has it, and dpfuse does not average it."""
    torch.manual_seed(1)
    (model, _), head = trained(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    for index, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(head(model(x)), y).backward()
        if index % 2:
            dpfuse.fused_allreduce_gradients(head.parameters())
        else:
            for param in head.parameters():
                dist.all_reduce(param.grad)
                param.grad /= size
        optimizer.step()


def only_by_hand(between):
    """A program whose only mean is the one that `between` takes."""

    def loop(rank, size):
        model, optimizer = trained()
        with model.no_sync():
            each_step(model, optimizer, lambda: between([*model.parameters()], rank, size))

    return loop


def in_fused_buffers(params, rank, size):
    dpfuse.fused_allreduce_gradients(params)


def of_gathered_gradients(params, rank, size):
    for param in params:
        of_ranks = [torch.empty_like(param.grad) for _ in range(size)]
        dist.all_gather(of_ranks, param.grad)
        param.grad = torch.stack(of_ranks).mean(0)


def on_rank_0_and_sent(params, rank, size):
    for param in params:
        dist.reduce(param.grad, 0)
        param.grad /= size
        dist.broadcast(param.grad, 0)


for way in (in_fused_buffers, of_gathered_gradients, on_rank_0_and_sent):
    PROGRAMS[f"only_mean_{way.__name__}"] = only_by_hand(way)


@program
def means_of_each_of_two_models(rank, size):
    """One model averages in its backward, and the gradients of the other one are averaged by hand."""
    (model, _), (other, _) = trained(), trained(model=net())
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.01)
    for x, y in batches():
        optimizer.zero_grad()
        with other.no_sync():
            loss_of(model(x) + other(x), y).backward()
            for param in other.parameters():
                dist.all_reduce(param.grad)
                param.grad /= size
        optimizer.step()


if __name__ == "__main__":
    run(PROGRAMS)
