"""Parameters and gradients that change in place, beside a sharded optimizer: as the plain one, or an error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.one_in import one_in

SEEN = "last.weight"  # the module looks at the address of each of its few parameters
UNSEEN = "many.5"  # in a module with many parameters, only at that of the first one
EACH = [(0, 1), (1,)]
KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, {}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, {}),
    "in backward": (torch.optim.AdamW, {"lr": 0.05}, {"step_in_backward": True}),
}


class Net(nn.Module):
    """Takes parameters of any shape and dtype. A square one differs from its transpose."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 4, bias=False)
        self.many = nn.ParameterList([torch.randn(3, 4) for _ in range(3)] + [torch.randn(4, 4) for _ in range(4)])
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        found = torch.tanh(x.to(self.first.weight.dtype) @ self.first.weight).double()
        for param in [*self.many, *self.last.parameters()]:
            numbers = 0.1 * torch.arange(param.numel(), dtype=torch.double).view(param.shape)
            found = found + 0.1 * (param.double() * numbers).sin().sum()
        return found


def make(kind="AdamW"):
    optimizer, settings, options = KINDS[kind]
    net = Net()
    plain = copy.deepcopy(net)
    model = dpfuse.DataParallel(net, comm_buffer_size=0.0001, last_comm_buffer_size=0.0001)
    sharded = dpfuse.ShardedOptimizer(model, optimizer, **settings, **options)
    return model, sharded, plain, optimizer(plain.parameters(), **settings)


def batch(rank, step):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model, optimizer, rank, step):
    optimizer.zero_grad()
    model(batch(rank, step)).square().mean().backward()


def train(model, optimizer, plain, plain_optimizer, rank, size, step, between=lambda net: None):
    """Make a step with both; `between` is called for each between backward and step."""
    backward(model, optimizer, rank, step)
    between(model.module)
    optimizer.step()
    plain_optimizer.zero_grad()
    (sum(plain(batch(other, step)).square().mean() for other in range(size)) / size).backward()
    between(plain)
    plain_optimizer.step()


def check(model, plain):
    for (name, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def move(net, name):
    param = net.get_parameter(name)
    param.data = param.data.clone()


def turn_memory(net, name):
    param = net.get_parameter(name)
    param.data = param.data.t().clone().t()


def set_to_clone(net, name):
    param = net.get_parameter(name)
    with torch.no_grad():
        param.set_(param.detach().clone())


def swap(net, name):
    param = net.get_parameter(name)
    torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))


def swap_with_a_view(net, name):
    """The new memory has a gap after each number."""
    param = net.get_parameter(name)
    wide = torch.zeros(4, 8)[:, ::2]
    param.data = wide.copy_(param.data)


def transpose(net, name):
    """At the same address."""
    param = net.get_parameter(name)
    param.data = param.data.t()


def transpose_in_place(net, name):
    with torch.no_grad():
        net.get_parameter(name).t_()


def exchange_in_a_module(net, name):
    one, other = net.get_parameter(name), net.many[4]
    one.data, other.data = other.data, one.data


def exchange_among_buckets(net, name):
    one, other = net.get_parameter(name), net.first.weight
    one.data, other.data = other.data, one.data


def in_turn(net, name):
    """Three, each of which gets the memory of the next one."""
    params = [net.first.weight, net.get_parameter(name), net.many[3]]
    data = [param.data for param in params]
    for param, each in zip(params, [*data[1:], data[0]], strict=True):
        param.data = each


KEEPING = [move, turn_memory, set_to_clone, swap, swap_with_a_view]
MOVING = [transpose, transpose_in_place, exchange_in_a_module, exchange_among_buckets, in_turn]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", one_in(4, KINDS))
@pytest.mark.parametrize("name", one_in(2, [UNSEEN, SEEN]))
@pytest.mark.parametrize("change", KEEPING + MOVING, ids=lambda one: one.__name__)
def test_other_memory_on_all_ranks_trains_as_the_plain_optimizer(rank, size, change, name, kind):
    both = make(kind)
    for step in range(7):
        if step == 2:
            change(both[0].module, name)
            change(both[2], name)
        between = (lambda net: change(net, name)) if step == 4 and kind != "in backward" else (lambda net: None)
        train(*both, rank, size, step, between)
    check(both[0], both[2])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", one_in(2, KINDS))
@pytest.mark.parametrize("change", KEEPING, ids=lambda one: one.__name__)
def test_other_memory_on_one_rank_with_the_same_values_trains_as_the_plain_optimizer(rank, size, change, kind):
    both = make(kind)
    for step in range(6):
        if step in (2, 4) and rank == 1:
            change(both[0].module, UNSEEN)
        train(*both, rank, size, step)
    check(both[0], both[2])


def convert(net, name):
    param = net.get_parameter(name)
    param.data = param.data.double()


def convert_by_swap(net, name):
    param = net.get_parameter(name)
    torch.utils.swap_tensors(param, nn.Parameter(param.detach().double()))


def convert_the_model(net, name):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def cut(net, name):
    param = net.get_parameter(name)
    param.data = param.data[:2].clone()


def cut_to_a_row(net, name):
    """Torch's copies would expand it to its old shape without a word."""
    param = net.get_parameter(name)
    param.data = param.data[:1].clone()


def reshape(net, name):
    """At the same address."""
    param = net.get_parameter(name)
    param.data = param.data.view(2, 8)


CONVERTING = [convert, convert_by_swap, convert_the_model, cut, cut_to_a_row, reshape]


def errors_of(work):
    """Return the words of the error that this raises; empty without one."""
    try:
        work()
    except dpfuse.DPFuseError as error:
        return str(error)
    return ""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [SEEN, UNSEEN])
@pytest.mark.parametrize("ranks_that_change", EACH, ids=str)
@pytest.mark.parametrize("change", CONVERTING, ids=lambda one: one.__name__)
def test_another_kind_before_the_forward_is_an_error_on_all(rank, size, change, ranks_that_change, name):
    """The plain optimizer fails, too: its state is of the old kind."""
    model, optimizer, *_ = both = make()
    for step in range(3):
        train(*both, rank, size, step)
    optimizer.zero_grad()
    if rank in ranks_that_change:
        change(model.module, name)
    found = errors_of(lambda: backward(model, optimizer, rank, 3)) or errors_of(optimizer.step)
    assert found
    if len(ranks_that_change) == 2 or "rank 1" not in found:
        assert "parameter '" in found or f"'{name}'" in found
    dist.barrier()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ranks_that_change", EACH, ids=str)
@pytest.mark.parametrize(
    "change", [one for one in CONVERTING if one is not convert_the_model], ids=lambda o: o.__name__
)
def test_another_kind_between_backward_and_step_is_an_error_on_all(rank, size, change, ranks_that_change):
    """Not even the dtype that is put back without a word. On the other ranks, the next backward is the error."""
    model, optimizer, *_ = both = make()
    for step in range(3):
        train(*both, rank, size, step)
    backward(model, optimizer, rank, 3)
    if rank in ranks_that_change:
        change(model.module, UNSEEN)
        with pytest.raises(dpfuse.DPFuseError, match=rf"parameter '{UNSEEN}' is float\d\d \(.*\) on cpu in a step"):
            optimizer.step()
    else:
        optimizer.step()
    with pytest.raises(dpfuse.DPFuseError, match="rank 1" if len(ranks_that_change) == 1 else UNSEEN):
        backward(model, optimizer, rank, 4)
    dist.barrier()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", one_in(3, ["AdamW", "SGD", "Adafactor"]))
@pytest.mark.parametrize("change", [convert, convert_by_swap, convert_the_model, cut], ids=lambda one: one.__name__)
def test_another_kind_trains_as_the_plain_optimizer_where_the_states_are_dropped(rank, size, change, kind):
    model, optimizer, plain, plain_optimizer = both = make(kind)
    for step in range(6):
        if step == 3:
            optimizer.zero_grad()
            optimizer.state.clear()
            plain_optimizer.state.clear()
            change(model.module, SEEN)
            change(plain, SEEN)
        train(*both, rank, size, step)
    check(model, plain)


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_states_are_converted_by_loading_them(rank, size, kind):
    model, optimizer, plain, plain_optimizer = both = make(kind)
    for step in range(6):
        if step == 3:
            for net, each in ((model.module, optimizer), (plain, plain_optimizer)):
                each.zero_grad()
                convert_the_model(net, SEEN)
                each.load_state_dict(each.state_dict())
        train(*both, rank, size, step)
    check(model, plain)
    assert {param.dtype for param in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("late", [False, True], ids=["before the step", "after an error"])
def test_a_state_of_the_new_shape_can_be_loaded(rank, size, late):
    model, optimizer, plain, plain_optimizer = both = make()
    for step in range(6):
        if step == 3:
            for net in (model.module, plain):
                cut(net, SEEN)
            states = plain_optimizer.state_dict()
            number = [name for name, _ in plain.named_parameters()].index(SEEN)
            for key in ("exp_avg", "exp_avg_sq"):
                states["state"][number][key] = states["state"][number][key][:2].clone()
            plain_optimizer.load_state_dict(copy.deepcopy(states))
            if late:
                backward(model, optimizer, rank, step)
                with pytest.raises(
                    dpfuse.DPFuseError, match=f"parameter '{SEEN}' is float32 \\(2, 4\\) on cpu, and its state"
                ):
                    optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(states))
        train(*both, rank, size, step)
    check(model, plain)


@pytest.mark.parametrize("ranks_that_change", EACH, ids=str)
def test_parameters_that_share_memory_are_an_error_on_all(rank, size, ranks_that_change):
    """The plain optimizer would update the shared memory twice in a step, the sharded one each copy once."""
    model, optimizer, *_ = both = make()
    train(*both, rank, size, 0)
    if rank in ranks_that_change:
        model.module.many[4].data = model.module.many[5].data
    backward(model, optimizer, rank, 1)
    if rank in ranks_that_change:
        with pytest.raises(dpfuse.DPFuseError, match=r"parameters 'many.4' and 'many.5' share memory"):
            optimizer.step()
    else:
        optimizer.step()
        with pytest.raises(dpfuse.DPFuseError, match=r"rank 1 has failed to update its part"):
            backward(model, optimizer, rank, 2)
    if rank == 1 and len(ranks_that_change) == 1:
        with pytest.raises(dpfuse.DPFuseError, match=r"rank 1 has failed to update its part"):
            backward(model, optimizer, rank, 2)
    dist.barrier()


def test_parameters_that_share_memory_are_refused_when_the_optimizer_is_made(rank, size):
    net = Net()
    net.many[4].data = net.many[5].data
    model = dpfuse.DataParallel(net)
    with pytest.raises(dpfuse.DPFuseError, match="share memory"):
        dpfuse.ShardedOptimizer(model, torch.optim.AdamW)
    fused = torch.randn(4, 8)
    net.many[4].data, net.many[5].data = fused[:, :4], fused[:, 4:]  # between each other, which is no error
    dpfuse.ShardedOptimizer(model, torch.optim.AdamW)


@pytest.mark.parametrize("ranks_that_change", EACH, ids=str)
def test_a_step_that_has_failed_on_some_ranks_is_mended_by_a_checkpoint(rank, size, ranks_that_change):
    model, optimizer, plain, _ = both = make()
    for step in range(2):
        train(*both, rank, size, step)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    backward(model, optimizer, rank, 2)
    if rank in ranks_that_change:
        model.module.many[4].data = model.module.many[5].data
        with pytest.raises(dpfuse.DPFuseError, match="share memory"):
            optimizer.step()
        model.module.many[4].data = model.module.many[4].data.clone()
    else:
        optimizer.step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in range(2, 5):
        train(*both, rank, size, step)
    check(model, plain)


def test_an_error_of_one_rank_in_backward_is_one_on_all(rank, size):
    """Also in the backwards that follow: the ranks stay together."""
    model, optimizer, *_ = both = make("in backward")
    train(*both, rank, size, 0)
    if rank == 1:
        model.module.many[4].data = model.module.many[5].data
    words = "many.4.*share memory" if rank == 1 else "rank 1 has failed to update its part"
    with pytest.raises(dpfuse.DPFuseError, match=words):
        backward(model, optimizer, rank, 1)
    for step in (2, 3, 4):
        with pytest.raises(dpfuse.DPFuseError, match="half updated"):
            backward(model, optimizer, rank, step)
    dist.barrier()


def grad_data(net):
    net.many[5].grad.data = torch.zeros(4, 4)


def grad_data_of_another(net):
    net.many[5].grad.data = net.many[4].grad.data


def grad_set(net):
    with torch.no_grad():
        net.many[5].grad.set_(torch.zeros(4, 4))


def grad_resized(net):
    net.many[5].grad.resize_(2, 8)


def grad_turned(net):
    net.many[5].grad.t_()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks_that_change", EACH, ids=str)
@pytest.mark.parametrize(
    "change",
    [grad_data, grad_data_of_another, grad_set, grad_resized, grad_turned],
    ids=lambda one: one.__name__,
)
def test_a_gradient_that_stands_for_parts_is_not_changed_in_place(rank, size, change, ranks_that_change):
    """The change is an error, and what follows is the step without it."""
    both = make()

    def between(net):
        if net is both[0].module and rank in ranks_that_change:
            with pytest.raises(dpfuse.DPFuseError, match=r"parameter 'many.\d'.*expected no use of .grad"):
                change(net)

    for step in range(4):
        train(*both, rank, size, step, between)
    check(both[0], both[2])


def test_memory_of_a_parameter_cannot_be_freed(rank, size):
    """It is that of a flat tensor. Torch says so when it is called, and nothing has changed."""
    both = make()
    for step in range(4):
        train(*both, rank, size, step)
        if rank == 1:
            with pytest.raises(RuntimeError, match="not resizable"):
                both[0].module.many[5].untyped_storage().resize_(0)
    check(both[0], both[2])


def test_a_conversion_that_converts_nothing_leaves_gradients_alone(rank, size):
    """Between backward and step, as Lightning does at its end."""
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(3, 6)).sum().backward()
    before = model.module[0].weight.clone()
    model.module.cpu()
    model.module.to(torch.float32)
    optimizer.step()
    assert not torch.equal(before, model.module[0].weight)
