"""What cannot be trained with a fixed number of micro-batches is refused by its name, when it is wrapped or called."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import dpfuse
from tests.distributed.same_bits.test_right_programs import Shared


def net(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Linear(4, 2))


def wrap(module=None, count=3, **options):
    return dpfuse.DataParallel(module or net(), fixed_micro_batches=count, **options)


def backward(model):
    model(torch.ones(2, 3)).sum().backward()


def loop(model):
    for _ in model.micro_batches():
        backward(model)


def test_without_a_process_group_it_is_refused():
    with pytest.raises(ValueError, match=r"fixed_micro_batches=3 was passed without a process group"):
        wrap()


@pytest.mark.ranks(size=2)
def test_fewer_micro_batches_than_ranks_are_refused(rank, size):
    with pytest.raises(ValueError, match=r"fixed_micro_batches=1 was passed on 2 ranks, .* at least as many"):
        wrap(count=1)
    loop(wrap(count=2))


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-2, ValueError), (True, TypeError), (2.0, TypeError), ("8", TypeError)]
)
def test_what_is_no_number_of_micro_batches_is_refused(group, value, error):
    with pytest.raises(error, match="fixed_micro_batches must be None or a whole number of at least 1"):
        wrap(count=value)


STATISTICS = [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True), nn.SyncBatchNorm(4)]


@pytest.mark.parametrize("layer", [*STATISTICS, nn.SyncBatchNorm(4).eval()])
def test_layers_with_statistics_of_a_rank_are_refused(group, layer):
    with pytest.raises(ValueError, match=rf"for the {type(layer).__name__} '1' .* Use GroupNorm or LayerNorm"):
        wrap(net(layer))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False)])
def test_layers_whose_statistics_are_those_of_a_micro_batch_or_stay_are_accepted(group, layer):
    loop(wrap(net(layer)))


def test_a_frozen_batch_norm_that_is_put_into_training_mode_is_named_after_the_loop(group):
    model = wrap(net(nn.BatchNorm1d(4).eval()))
    loop(model)
    model.zero_grad()
    model.train()
    with pytest.raises(dpfuse.DPFuseError, match=r"the buffer '1\.running_mean' was written"):
        loop(model)


class Counting(nn.Module):
    """Writes a buffer in forward, in place or by another tensor."""

    def __init__(self, in_place, persistent=True):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x


@pytest.mark.parametrize("count", [1, 2, 3, 4])  # a new tensor may get the id of one that it replaces
@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_a_forward_writes_is_named(group, in_place, count):
    model = wrap(net(Counting(in_place)), count)
    for _ in range(3):
        named = r"rank 0: the buffer '1\.calls' was written while micro-batches ran"
        with pytest.raises(dpfuse.DPFuseError, match=named):
            loop(model)
        model.zero_grad()


class Uncounted(nn.Module):
    """Writes its buffer in a way that does not move its version, from one forward on."""

    def __init__(self, write, begins=0):
        super().__init__()
        self.write, self.begins, self.forwards = write, begins, 0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        version = self.mean._version
        if self.forwards >= self.begins:
            self.write(self, x.detach())
        self.forwards += 1
        assert self.mean._version == version
        return x


def by_numpy(layer, x):
    layer.mean.numpy()[:] += x.mean(0).numpy()


UNCOUNTED = {
    "batch_norm": lambda layer, x: nn.functional.batch_norm(x, layer.mean, layer.var, training=True),
    "data": lambda layer, x: layer.mean.data.add_(x.mean(0)),
    "foreach": lambda layer, x: torch._foreach_add_([layer.mean.data], 1.0),
    "numpy": by_numpy,
    "assigned": lambda layer, x: setattr(layer.mean, "data", x.mean(0)),
}


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
@pytest.mark.parametrize("way", UNCOUNTED)
def test_a_write_that_torch_does_not_count_is_named_on_every_rank(rank, size, way, face):
    module = net(Uncounted(UNCOUNTED[way]))
    model = face(module, fixed_micro_batches=3, **({"broadcast_buffers": False} if "Dist" in face.__name__ else {}))
    for step in range(2):
        with pytest.raises(dpfuse.DPFuseError, match=rf"rank {rank}: the buffer '1\.mean' was written while micro"):
            for number in model.micro_batches():
                model(torch.ones(2, 3) * (number + 5 * step)).sum().backward()
        model.zero_grad()


def test_it_is_named_in_the_first_step_of_another_mode(group):
    model = wrap(net(Uncounted(lambda layer, x: layer.training and UNCOUNTED["batch_norm"](layer, x)).eval()))
    for _ in range(5):
        loop(model)
        model.zero_grad()
    model.train()
    with pytest.raises(dpfuse.DPFuseError, match=r"the buffer '1\.mean' was written"):
        loop(model)


def test_later_one_step_in_sixty_four_compares_values(group):
    model = wrap(net(Uncounted(UNCOUNTED["batch_norm"], begins=3 * 5)))
    seen = []
    for step in range(66):
        try:
            loop(model)
        except dpfuse.DPFuseError:
            seen.append(step)
        model.zero_grad()
    assert seen == [64, 65]


def test_buffers_that_are_written_between_loops_are_no_error(group):
    module = net(Uncounted(lambda layer, x: None))
    model = wrap(module)
    for step in range(3):
        loop(model)
        model.zero_grad()
        module[1].mean.data.add_(step + 1)
        module[1].var = torch.full((4,), float(step))


def test_it_is_named_where_the_data_end_the_loop(group):
    model = wrap(net(Counting(False)), 2)
    with pytest.raises(dpfuse.DPFuseError, match="was written while micro-batches ran"):
        for _batch, _number in zip(range(2), model.micro_batches(), strict=False):
            backward(model)


def test_a_buffer_that_no_checkpoint_keeps_may_be_written(group):
    loop(wrap(net(Counting(True, persistent=False))))


def test_sparse_gradients_are_refused(group):
    module = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"the parameter '0\.weight' with sparse gradients, .* sparse=False"):
        wrap(module)


def test_a_second_wrapper_of_the_same_parameters_is_refused(group):
    module = net()
    first = wrap(module)
    with pytest.raises(ValueError, match=r"belongs to another wrapper .* fixed_micro_batches"):
        dpfuse.DataParallel(module)
    loop(first)


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
def test_the_loop_is_refused_without_the_option(group, face):
    with pytest.raises(dpfuse.DPFuseError, match=r"wrapper without fixed_micro_batches, .* fixed_micro_batches=8"):
        face(net()).micro_batches()


def test_the_switch_of_no_sync_cannot_be_set(group):
    model = wrap()
    with pytest.raises(dpfuse.DPFuseError, match="require_backward_grad_sync was set"):
        model.require_backward_grad_sync = True
    loop(model)


@pytest.mark.parametrize("ask", [lambda model: model.grad_norm(), lambda model: model.clip_grad_norm_(1.0)])
def test_a_norm_inside_the_loop_is_refused(group, ask):
    model = wrap()
    for number in model.micro_batches():
        backward(model)
        if number == 1:
            with pytest.raises(dpfuse.DPFuseError, match=r"the norm .* at micro-batch 1, before .* 0, 1, 2 were added"):
                ask(model)
    assert model.grad_norm().isfinite()


def test_zero_grad_inside_the_loop_is_named(group):
    model = wrap()
    with pytest.raises(dpfuse.DPFuseError, match=r"goes on after micro-batch 0, but it has ended.* zero_grad\(\)"):
        for _ in model.micro_batches():
            backward(model)
            model.zero_grad()
    loop(model)


def uneven_loop(model):
    for number in model.micro_batches():
        model.module.uses = 3 if number == 0 else 2
        backward(model)


def test_a_micro_batch_in_which_more_of_a_gradient_comes_than_in_others_is_named(group):
    model = wrap(Shared())
    loop(model)
    model.zero_grad()
    text = r"'layer\.\w+' of micro-batch 0 came after .* Use the parameter equally often"
    with pytest.raises(dpfuse.DPFuseError, match=text):
        uneven_loop(model)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("text", ["0", "two", "-1", "1.5", ""])
def test_a_number_of_threads_that_is_none_is_refused(group, threads, monkeypatch, text):
    monkeypatch.setenv("DPFUSE_THREADS", text)
    with pytest.raises(ValueError, match=f"DPFUSE_THREADS must be a whole number of at least 1, got '{text}'"):
        wrap()


@pytest.mark.parametrize(("text", "count"), [(None, 1), ("2", 2)])
def test_torch_computes_with_one_thread_or_as_many_as_are_asked_for(group, threads, monkeypatch, text, count):
    torch.set_num_threads(3)
    monkeypatch.delenv("DPFUSE_THREADS", raising=False)
    if text is not None:
        monkeypatch.setitem(os.environ, "DPFUSE_THREADS", text)
    model = wrap()
    assert torch.get_num_threads() == count
    loop(model)
    model.zero_grad()
    torch.set_num_threads(4)
    with pytest.raises(dpfuse.DPFuseError, match=f"torch computes with 4 threads, expected {count}"):
        model.micro_batches()
