"""The lines that the pages show for a batch that is too large: all ranks skip it, and training goes on rightly."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.docs.pages import ROOT, blocks_of

PAGE = ROOT / "docs/wrong/index.md"
BATCHES = 6


def function_of_page(name):
    """Return the function of this name, as the page has it."""
    (text,) = (block.text for block in blocks_of(PAGE) if f"def {name}(" in block.text)
    names = {"torch": torch}
    exec(text, names)
    return names[name]


class Net(nn.Module):
    """A module that runs out of memory at one place, in one batch."""

    def __init__(self, place="", batch=-1):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        self.place, self.batch, self.seen = place, batch, 0
        if place == "hook":
            self.layers[2].weight.register_hook(self.fail)
        if place == "late hook":
            self.layers[0].weight.register_hook(self.fail)

    def forward(self, x):
        self.seen += 1
        if self.place == "forward":
            self.fail()
        return self.layers(x)

    def fail(self, grad=None):
        if self.seen == self.batch + 1:
            raise torch.OutOfMemoryError("planted")
        return grad

    def loss(self, outputs):
        if self.place == "loss":
            self.fail()
        if self.place == "backward of the loss":
            outputs.register_hook(self.fail)
        return outputs.square().sum()


class Checked(torch.optim.SGD):
    """An optimizer that compares each mean with that of a bare module, which gets the batches of all ranks.

    Args:
        model: the wrapped module.
        size: of the group.
        numbers: of the batches that are stepped on.
        share: of the batch of rank 1 in which it runs out of memory.
    """

    def __init__(self, model, size, numbers, share=1.0):
        super().__init__(model.parameters(), lr=0.01)
        self.model, self.size, self.numbers, self.share = model, size, list(numbers), share

    def step(self):
        number, net = self.numbers.pop(0), self.model.module
        bare = copy.deepcopy(net)
        bare.place = ""
        bare.zero_grad()
        for rank in range(self.size):
            share = self.share if (rank, number) == (1, net.batch) else 1.0
            (share / self.size * bare.loss(bare(batch(rank, number)))).backward()
        for got, expected in zip(self.model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)
        super().step()


def batch(rank, number):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))


def assert_equal_weights(model, size):
    for param in model.parameters():
        found = [torch.empty_like(param) for _ in range(size)]
        dist.all_gather(found, param.detach())
        assert all(torch.equal(found[0], each) for each in found)


def batches_of(rank):
    return [batch(rank, number) for number in range(BATCHES)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("place", ["backward of the loss", "hook", "late hook"])
@pytest.mark.parametrize("number", [0, 1, 3, BATCHES - 2])
def test_the_lines_of_the_page_skip_a_batch_on_all_ranks(rank, size, number, place, views):
    net = Net(place if rank == 1 else "", number)
    model = dpfuse.DataParallel(net, None, 0, 0, gradient_as_bucket_view=views)
    optimizer = Checked(model, size, [each for each in range(BATCHES) if each != number])
    function_of_page("train")(model, optimizer, net.loss, batches_of(rank))
    assert optimizer.numbers == []
    assert_equal_weights(model, size)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", ["forward", "loss"])
@pytest.mark.parametrize("number", [0, 3, BATCHES - 1])
def test_a_loss_of_zero_takes_the_place_of_a_batch_whose_loss_could_not_be_computed(rank, size, number, place):
    net = Net(place if rank == 1 else "", number)
    model = dpfuse.DataParallel(net, None, 0, 0)
    optimizer = Checked(model, size, range(BATCHES), share=0.0)
    for x in batches_of(rank):
        function_of_page("loss_or_zero")(model, net.loss, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert net.seen == BATCHES + (net.place == "forward")
    assert_equal_weights(model, size)
