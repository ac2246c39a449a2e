"""Windows that are cut short, lost, or whose gradients are changed: from traces of real loops, and from made ones."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse.rules import l06_changed_in_window
from dpfuse.rules.l03_cut_window import find_lost_batches, find_unaveraged_step
from dpfuse.trace.process_trace import process_tracer, start_tracer, stop_tracer
from dpfuse.trace_file import read_folder
from tests.commands.doctor.made import NAMES, traces_of, window
from tests.loops.nets import batches, loss_of, mlp
from tests.torch_ddp import torch_ddp

LOOKS = {"unaveraged": find_unaveraged_step, "lost": find_lost_batches, "changed": l06_changed_in_window.find}
WRONG: dict[str, Any] = {}
RIGHT: dict[str, Any] = {}
DEEP = 4  # steps with all hashes; the others show windows as well


def wrong(kind):
    def register(loop):
        WRONG[loop.__name__] = (kind, loop)
        return loop

    return register


def right(loop):
    RIGHT[loop.__name__] = loop
    return loop


def synchronising(model, sync):
    return nullcontext() if sync else model.no_sync()


def accumulate(model, optimizer, rank, length, count, between=lambda: None, **zero):
    """Train an epoch of so many batches in windows of `count`; what is left has a step only if it has an average."""
    for index, (x, y) in enumerate(batches(rank, length)):
        sync = index % count == count - 1
        with synchronising(model, sync):
            loss_of(model(x), y).backward()
        between()
        if sync:
            optimizer.step()
            optimizer.zero_grad(**zero)


# --- Wrong ---


@wrong("unaveraged")
def rest_of_an_epoch_has_a_step_in_no_sync(model, optimizer, rank):
    for epoch in range(2):
        for index, (x, y) in enumerate(batches(rank, 19, epoch)):
            with synchronising(model, index % 2):
                loss_of(model(x), y).backward()
            if index % 2 or index == 18:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()


@wrong("unaveraged")
def short_epochs_whose_rest_has_a_step_behind_them(model, optimizer, rank):
    for epoch in range(4):
        accumulate(model, optimizer, rank + 7 * epoch, 11, 3, set_to_none=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@wrong("lost")
def rest_of_an_epoch_is_zeroed(model, optimizer, rank):
    for epoch in range(3):
        optimizer.zero_grad()
        accumulate(model, optimizer, rank + 7 * epoch, 17, 2)


@wrong("lost")
def rest_of_an_epoch_is_filled_with_zeros(model, optimizer, rank):
    for epoch in range(3):
        model.zero_grad(set_to_none=False)
        accumulate(model, optimizer, rank + 7 * epoch, 26, 3, set_to_none=False)


@wrong("changed")
def clipping_after_each_batch(model, optimizer, rank):
    accumulate(model, optimizer, rank, 12, 3, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


@wrong("changed")
def division_after_each_averaged_batch(model, optimizer, rank):
    for index, (x, y) in enumerate(batches(rank, 12)):
        loss_of(model(x), y).backward()
        for param in model.parameters():
            param.grad /= 2
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


# --- Right ---


@right
def rest_of_an_epoch_is_averaged(model, optimizer, rank):
    for epoch in range(3):
        for index, (x, y) in enumerate(batches(rank, 17, epoch)):
            sync = index % 2 or index == 16
            with synchronising(model, sync):
                loss_of(model(x), y).backward()
            if sync:
                optimizer.step()
                optimizer.zero_grad()


@right
def rest_of_an_epoch_is_averaged_by_hand(model, optimizer, rank):
    for epoch in range(3):
        accumulate(model, optimizer, rank + 7 * epoch, 17, 2)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


@right
def weights_are_averaged_by_hand_after_the_rest(model, optimizer, rank):
    for epoch in range(3):
        accumulate(model, optimizer, rank + 7 * epoch, 17, 2)
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            dist.all_reduce(param.data)
            param.data /= dist.get_world_size()


@right
def a_gradient_for_a_log_every_five_windows(model, optimizer, rank):
    for epoch in range(5):
        accumulate(model, optimizer, rank + 7 * epoch, 10, 2)
        *_, (x, y) = batches(rank + 7 * epoch, 10)
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.zero_grad()


@right
def rows_are_masked_after_each_batch(model, optimizer, rank):
    """Textual inversion: only some rows of an embedding are trained."""
    accumulate(model, optimizer, rank, 12, 3, lambda: model.module[0].weight.grad[2:].zero_())


@right
def a_penalty_is_added_by_hand_after_each_batch(model, optimizer, rank):
    params = [*model.parameters()]
    accumulate(model, optimizer, rank, 12, 3, lambda: [param.grad.add_(param.detach(), alpha=0.01) for param in params])


@right
def a_gradient_is_kept_and_put_back(model, optimizer, rank):
    """PGD: gradients of attacks are dropped, and that of the attacked model is added to the first one."""
    for x, y in batches(rank, 10):
        with model.no_sync():
            loss_of(model(x), y).backward()
            kept = [param.grad.clone() for param in model.parameters()]
            model.zero_grad()
            loss_of(model(x + 0.1), y).backward()
        for param, grad in zip(model.parameters(), kept, strict=True):
            param.grad = grad
        loss_of(model(x + 0.2), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@right
def a_generator_whose_loss_writes_the_critic(model, optimizer, rank):
    """The gradients of the critic are zeroed before its own turn."""
    other = torch_ddp(nn.Linear(3, 4))
    process_tracer().add(other)
    own = torch.optim.Adam(other.parameters())
    for _, y in batches(rank, 24):
        optimizer.zero_grad()
        loss_of(model(other(y).detach()), y).backward()
        optimizer.step()
        own.zero_grad()
        with model.no_sync():
            loss_of(model(other(y)), y).backward()
        own.step()


def traced(rank: int, size: int, folder: Path, name: str, wrap: str) -> None:
    _, loop = WRONG.get(name) or ("", RIGHT[name])
    tracer = start_tracer(folder, DEEP)
    try:
        ours = {"check_training": "off"}
        model: Any = torch_ddp(mlp()) if wrap == "torch" else dpfuse.DistributedDataParallel(mlp(), **ours)
        tracer.add(model)
        loop(model, torch.optim.SGD(model.parameters(), lr=0.01), rank)
    finally:
        stop_tracer()


def told(traces):
    return [kind for kind, look in LOOKS.items() if look(traces) is not None]


WAYS = {"torch": "torch", "dpfuse": "dpfuse"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrap", WAYS)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_windows_is_told(name, wrap, ranks, tmp_path):
    ranks(traced, tmp_path, name, wrap)
    assert told(read_folder(tmp_path)) == [WRONG[name][0]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrap", WAYS)
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_told_of_right_windows(name, wrap, ranks, tmp_path):
    ranks(traced, tmp_path, name, wrap)
    assert told(read_folder(tmp_path)) == []


# --- Made traces ---


def usual(count):
    return [window("lla") for _ in range(count)]


APART = ("1", "2")


@pytest.mark.parametrize(
    ("windows", "step"),
    [
        ([*usual(8), window("ll", APART), window("lla", APART)], 8),
        ([*usual(4), window("ll", APART), *[window("lla", APART) for _ in range(4)], window("l", APART)], 4),
        ([*usual(7), window("ll", APART), window("lla", APART)], None),  # too few show what is usual
        ([*usual(8), window("lll", APART), window("lla", APART)], None),  # no shorter: local steps
        ([*usual(8), window("la", APART), window("lla", APART)], None),  # averaged
        ([*usual(8), window("ll"), window("lla")], None),  # averaged by hand
        ([*usual(8), window("ll", APART), window("lla")], None),  # weights averaged by hand
        ([*usual(8), window("ll", APART), window("ll", APART)], None),  # it goes on with local steps
        ([*usual(8), window("ll", APART)], None),  # what comes next is not known
        ([*[window("lla", APART) for _ in range(8)], window("ll", APART), window("lla", APART)], None),  # always apart
    ],
)
def test_a_short_window_without_average_is_told_where_the_ranks_part(windows, step):
    seen = find_unaveraged_step(traces_of(*windows))
    assert (seen is None) == (step is None)
    if seen is not None:
        assert "8 windows in a row of SGD had 3 backwards each" in seen.text
        assert f"Step {step} came after 2, and none of them was averaged" in seen.text


def test_weights_that_ranks_have_hashed_in_two_ways_are_not_compared():
    traces = traces_of(*usual(8), window("ll"), window("lla"))
    for line in traces[1].steps[8:]:
        line["parameters"] = line.pop("all_parameters")
    assert find_unaveraged_step(traces) is None


def test_weights_that_no_two_ranks_have_in_common_are_not_compared():
    traces = traces_of(*usual(8), window("ll", APART), window("lla", APART))
    traces[1].optimizers[0] = {"class": "SGD", "names": NAMES[:1]}
    assert find_unaveraged_step(traces) is None


def lost(*rests, between=5):
    """So many whole windows, and then a rest that is zeroed without a step; again and again."""
    windows = usual(3)
    for rest in rests:
        windows += [*usual(between), window(f"{rest}0lla")]
    return traces_of(*windows)


def test_equal_rests_at_equal_distances_are_told():
    seen = find_lost_batches(lost("l", "l", "l"))
    assert seen is not None
    assert (
        "the last 8 windows of SGD had 3 backwards each. 2 windows, of 1 each, were zeroed without a step" in seen.text
    )


@pytest.mark.parametrize(
    "traces",
    [
        lost("l", "ll", "l"),  # of other lengths
        lost("l0l", "l0l", "l0l"),  # two for each step
        lost("lla", "lla", "lla"),  # whole windows: a scaler skips steps
        lost("l", "l", "l", between=2),  # at distances that no epoch has
        lost("l"),
    ],
)
def test_other_windows_without_a_step_are_not_told(traces):
    assert find_lost_batches(traces) is None


def test_a_batch_that_is_trained_on_as_well_is_not_lost():
    traces = lost("l", "l", "l")
    assert find_lost_batches(traces) is not None
    for line in traces[0].steps:
        if len(line["backwards"]) > 3:
            line["forwards"][0] = line["forwards"][1]
    assert find_lost_batches(traces) is None


def scaled(*places, added=True):
    """A step with all hashes, before whose second backward the gradients at these places were scaled."""
    lines = window("la", parameters="x" * 16)
    for line in lines:
        line["backwards"][1] |= {"rescaled": {"0": list(places)}, "local": {"0": ("f" if added else "-") * 16}}
    return lines


def test_gradients_that_are_scaled_in_two_windows_are_named():
    seen = l06_changed_in_window.find(traces_of(scaled(1), window("la"), scaled(1)))
    assert seen is not None
    assert "in 2 windows, the gradients of bias of model 0 (Net) were scaled or cut" in seen.text
    assert "on rank 0; before step 2, 1 of 2 backwards found them so" in seen.text
    assert "weight, bias of model 0" in str(l06_changed_in_window.find(traces_of(scaled(0, 1), scaled(1))))


def test_gradients_that_are_scaled_once_or_before_another_loss_are_not_told():
    assert l06_changed_in_window.find(traces_of(scaled(1), window("la"))) is None
    assert l06_changed_in_window.find(traces_of(*[scaled(0, 1, added=False) for _ in range(3)])) is None
