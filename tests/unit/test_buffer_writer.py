"""Buffers get new values: what a program has of their memory shows them, and graphs keep the values they saved."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from dpfuse.model.buffer_writer import BufferWriter


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))


class Outer(nn.Module):
    """A loss with a view of another module's buffer."""

    def __init__(self, net):
        super().__init__()
        self.center = net.scale[1:3]


class Doubled(torch.Tensor):
    pass


NEW = torch.tensor([9.0, 8.0, 7.0, 6.0])
# What a program keeps of the buffer, and how to read it as numbers that follow the buffer.
KEPT = {
    "nothing": lambda net: lambda: net.scale,
    "the same tensor": lambda net: (lambda kept: lambda: kept)(net.scale),
    "detach": lambda net: (lambda kept: lambda: kept)(net.scale.detach()),
    "data": lambda net: (lambda kept: lambda: kept)(net.scale.data),
    "view": lambda net: (lambda kept: lambda: kept.view(4))(net.scale.view(2, 2)),
    "view of a view": lambda net: (lambda kept: lambda: kept.flatten())(net.scale.view(2, 2).t().t()),
    "state_dict": lambda net: (lambda kept: lambda: kept["scale"])(net.state_dict()),
    "loss": lambda net: (lambda kept: lambda: torch.cat((NEW[:1], kept.center, NEW[3:])))(Outer(net)),
    "numpy": lambda net: (lambda kept: lambda: torch.from_numpy(kept))(net.scale.numpy()),
    "subclass": lambda net: (lambda kept: lambda: kept.as_subclass(torch.Tensor))(net.scale.as_subclass(Doubled)),
    "parameter": lambda net: (lambda kept: lambda: kept.detach())(nn.Parameter(net.scale)),
    "two": lambda net: (lambda *kept: lambda: kept[0].detach())(net.scale.detach(), net.scale[:2], net.scale),
}


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


GRAPHS = {
    "buffer": lambda x, scale: x * scale,
    "view": lambda x, scale: x.view(2, 2) * scale.view(2, 2),
    "detached view": lambda x, scale: x.view(1, 4) * scale.detach().reshape(1, -1)[:, :4],
    "function": lambda x, scale: Multiply.apply(x, scale.view(4)),
    "both": lambda x, scale: x * scale + x * scale.view(4),
    "view from C++": lambda x, scale: torch.einsum("i,i->i", x, scale.detach()),
}
# Where a program has another kind of tensor, and where the graph has what only C++ can reach, nothing can be parted.
REFUSED = {"subclass", "parameter"}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("keep", KEPT)
def test_what_a_program_keeps_shows_the_new_values_and_a_graph_has_the_old_ones(keep, graph):
    net = Net()
    scale, kept, x = net.scale, KEPT[keep](net), torch.ones(4, requires_grad=True)
    old = scale.clone()
    writer = BufferWriter(net, [scale])
    for turn in range(3):
        out = GRAPHS[graph](x, scale)
        new = NEW + turn
        writer([new])
        assert net.scale is scale
        assert torch.equal(scale, new)
        if keep != "loss":
            assert torch.equal(kept(), new)
        else:
            assert torch.equal(kept()[1:3], new[1:3])
        refused = keep in REFUSED or (graph == "view from C++" and keep not in ("nothing", "the same tensor"))
        if refused:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            (gradient,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(gradient, old * (2 if graph == "both" else 1))
        old = new
        del out


@pytest.mark.parametrize("keep", KEPT)
def test_without_a_graph_a_buffer_is_written_in_its_memory_and_counted(keep):
    net = Net()
    kept, writer = KEPT[keep](net), BufferWriter(net, [net.scale])
    address, version = net.scale.data_ptr(), net.scale._version
    for turn in range(3):
        writer([NEW + turn])
        assert net.scale.data_ptr() == address
        assert net.scale._version == version + turn + 1
    assert torch.equal(kept()[1:3], net.scale[1:3])


def counting(monkeypatch):
    calls, objects = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: calls.append(1) or objects())
    return calls


@pytest.mark.parametrize("keep", ["detach", "view", "state_dict", "two"])
@pytest.mark.parametrize("graph", [None, "buffer"])
def test_objects_are_searched_once_for_what_a_program_keeps(monkeypatch, keep, graph):
    net, x = Net(), torch.ones(4, requires_grad=True)
    kept, writer = KEPT[keep](net), BufferWriter(net, [net.scale])
    calls = counting(monkeypatch)
    for turn in range(5):
        out = graph and GRAPHS[graph](x, net.scale)
        writer([NEW + turn])
        del out
    assert len(calls) == 1
    second = net.scale.detach()
    writer([NEW])
    assert len(calls) == 2
    assert torch.equal(second, NEW)
    del kept


@pytest.mark.parametrize("graph", ["view", "detached view", "view from C++"])
def test_a_mask_that_never_changes_costs_no_search(monkeypatch, graph):
    net, x = Net(), torch.ones(4, requires_grad=True)
    writer = BufferWriter(net, [net.scale])
    calls = counting(monkeypatch)
    for _ in range(5):
        out = GRAPHS[graph](x, net.scale)
        writer([net.scale.clone()])
        out.sum().backward()
    assert len(calls) == 1


def test_where_nothing_is_shared_objects_are_not_searched(monkeypatch):
    net, x = Net(), torch.ones(4, requires_grad=True)
    writer, calls = BufferWriter(net, [net.scale]), counting(monkeypatch)
    for turn in range(3):
        out = x * net.scale
        writer([NEW + turn])
        out.sum().backward()
        writer([NEW])
    assert calls == []


def test_two_buffers_of_one_memory_stay_parts_of_it():
    net, x = nn.Module(), torch.ones(2, requires_grad=True)
    net.register_buffer("both", torch.arange(4.0))
    net.register_buffer("head", net.both[:2])
    writer = BufferWriter(net, [net.both, net.head])
    for turn in range(3):
        out = x * net.head + x * net.both[2:]
        expected = (net.head + net.both[2:]).clone()
        writer([NEW + turn, NEW[:2] + turn])
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(gradient, expected)
        assert net.head.data_ptr() == net.both.data_ptr()
        net.both += 1
        assert torch.equal(net.head, NEW[:2] + turn + 1)


def test_memory_that_other_processes_have_stays_the_buffers():
    net, x = Net(), torch.ones(4, requires_grad=True)
    net.scale.share_memory_()
    address, writer = net.scale.data_ptr(), BufferWriter(net, [net.scale])
    out, old = x * net.scale, net.scale.clone()
    writer([NEW])
    assert net.scale.data_ptr() == address
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, old)


def test_where_frozen_objects_hide_tensors_autograd_refuses_a_graph_that_needs_the_old_values():
    net, x = Net(), torch.ones(4, requires_grad=True)
    kept, writer = net.scale.detach(), BufferWriter(net, [net.scale])
    gc.freeze()
    try:
        writer([NEW])
        out = x * net.scale
        writer([NEW + 1])
    finally:
        gc.unfreeze()
    assert torch.equal(kept, NEW + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_user_still_hears_of_his_own_write_to_what_a_graph_needs():
    """The tensors that were parted from a graph count their versions together."""
    net, x = Net(), torch.ones(4, requires_grad=True)
    kept, writer = net.scale.detach(), BufferWriter(net, [net.scale])
    first = x * net.scale
    writer([NEW])
    second = x * kept
    net.scale.add_(1)
    first.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


def test_memory_that_a_program_assigns_is_written():
    net, x = Net(), torch.ones(4, requires_grad=True)
    writer = BufferWriter(net, [net.scale])
    kept = net.scale.detach()
    writer([NEW])
    net.scale.data = torch.zeros(4)
    out = x * net.scale.view(4)
    writer([NEW + 1])
    assert torch.equal(kept, NEW)
    assert torch.equal(net.scale, NEW + 1)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, torch.zeros(4))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("keep", [False, True])
def test_a_scripted_module_has_the_new_values(keep):
    class Scaled(Net):
        def forward(self, x):
            return x * self.scale

    net, x = torch.jit.script(Scaled()), torch.ones(4, requires_grad=True)
    kept, old = net.scale.detach() if keep else None, net.scale.clone()
    writer = BufferWriter(net, [net.scale])
    for turn in range(3):
        out = x * net.scale
        writer([NEW + turn])
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(gradient, old)
        assert torch.equal(net(x), NEW + turn)
        assert kept is None or torch.equal(kept, NEW + turn)
        old = NEW + turn


def test_a_copy_of_a_parted_buffer_is_one_of_its_own():
    net, x = Net(), torch.ones(4, requires_grad=True)
    kept, writer = net.scale.detach(), BufferWriter(net, [net.scale])
    out = x * net.scale
    writer([NEW])
    other = copy.deepcopy(net)
    other.scale.zero_()
    assert torch.equal(kept, NEW)
    del out
