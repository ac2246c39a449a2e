"""What `check_training` does at each level, and what it costs."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from dpfuse.errors import DPFuseError, LoopWarning
from dpfuse.findings import LOOP, findings
from dpfuse.loop import input_comparison
from dpfuse.loop.local_rest import LocalRest
from tests.loops.logs import logged
from tests.loops.nets import batches, loss_of, mlp, train, with_sgd
from tests.operations import Operations


def late_switch(model, rank, steps, data_of=None):
    """The loop of DPF-L01; returns its errors, each with the step, and the warnings.

    `data_of` is the rank whose batches this one has.
    """
    findings.forget()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader, errors = batches(rank if data_of is None else data_of, 2 * steps), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LoopWarning)
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(2):
                x, y = next(loader)
                loss = loss_of(model(x), y)
                model.require_backward_grad_sync = micro == 1
                try:
                    loss.backward()
                except DPFuseError as error:
                    errors.append((step, error))
            optimizer.step()
    return errors, [each for each in caught if isinstance(each.message, LoopWarning)]


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
def test_raise_is_an_error_two_averages_after_the_first_such_step(rank, size, face):
    errors, warned = late_switch(face(mlp(), check_training="raise"), rank, 4)
    assert [(step, error.code) for step, error in errors] == [(2, "DPF-L01")]
    assert f"rank {rank}: SGD has stepped on gradients that are not the mean over the ranks" in str(errors[0][1])
    assert ("Rank 0 has seen such a step, too." in str(errors[0][1])) is (rank > 0)
    assert "test_check_training.py:" in str(errors[0][1])
    assert warned == []


def test_a_rank_that_has_seen_nothing_raises_too(rank, size):
    model = dpfuse.DataParallel(mlp())
    with mock.patch.object(LocalRest, "before_step") if rank else nullcontext():
        errors, _ = late_switch(model, rank, 4)
    ((step, error),) = errors
    assert (step, error.code) == (2, "DPF-L01")
    assert ("On rank 0, backwards that were not synchronised" in str(error)) is (rank == 1)


def test_nothing_is_said_where_all_ranks_have_added_the_same(rank, size):
    errors, warned = late_switch(dpfuse.DataParallel(mlp()), rank, 40, data_of=0)
    assert errors == []
    assert {each.message.code for each in warned} <= {"DPF-L05"}  # unless an earlier test has left a model


def test_ranks_that_add_the_same_are_looked_at_ever_less_often(rank, size):
    model = dpfuse.DataParallel(mlp())
    with mock.patch.object(model._sync.loop, "_suspect", wraps=model._sync.loop._suspect) as suspect:
        late_switch(model, rank, 40, data_of=0)
    assert suspect.call_count == 6  # after 1, 2, 4, 8, 16 and 32 steps


@pytest.mark.parametrize("same", [True, False])
def test_a_checkpoint_settles_what_is_suspected(rank, size, same):
    """On one rank only, and no backward follows."""
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mock.patch.object(LocalRest, "before_step") if rank else nullcontext():
        for index, (x, y) in enumerate(batches(0 if same else rank, 2)):
            with model.no_sync(enabled=index == 1):
                loss_of(model(x), y).backward()
        optimizer.step()
    with TemporaryDirectory() as folder, nullcontext() if same else pytest.raises(DPFuseError, match="DPF-L01"):
        dpfuse.save_checkpoint(folder, model, optimizer, step=1)


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_suspected_of_the_last_step_is_logged_as_the_program_ends(rank, size, steps):
    model = dpfuse.DataParallel(mlp())
    findings.forget()
    late_switch(model, rank, steps, data_of=0)
    with mock.patch.object(findings, "note") as note:
        model._sync.weights.tell_open()
    assert [call.args[0] for call in note.call_args_list] == ["DPF-L01"] * (steps == 1)


def test_warn_goes_on_and_warns_once(rank, size):
    model = dpfuse.DataParallel(mlp(), check_training="warn")
    errors, warned = late_switch(model, rank, 12)
    assert errors == []
    assert [each.message.code for each in warned] == ["DPF-L01"]


def test_where_weights_are_not_compared_it_goes_to_the_log(rank, size):
    model = dpfuse.DataParallel(mlp())
    model._sync.weights.turn_off("this test wants it")
    with mock.patch.object(findings, "note") as note:
        assert late_switch(model, rank, 3) == ([], [])
    assert {call.args[0] for call in note.call_args_list} == {"DPF-L01"}


def test_log_writes_what_would_be_a_warning(rank, size):
    with logged() as said:
        errors, warned = late_switch(dpfuse.DataParallel(mlp(), check_training="log"), rank, 4)
    assert (errors, warned) == ([], [])
    assert [record.getMessage().partition(":")[0] for record in said] == ["DPF-L01"]


def test_off_looks_at_nothing(rank, size):
    model = dpfuse.DataParallel(mlp(), check_training="off")
    assert model._sync.loop is None
    assert late_switch(model, rank, 3) == ([], [])


def test_patch_warns_unless_it_is_told_otherwise(rank, size):
    for options, level in (({}, "warn"), ({"check_training": "raise"}, "raise"), ({"check_training": "off"}, "off")):
        with dpfuse.patch(**options):
            assert DistributedDataParallel(mlp())._options.common["check_training"] == level
    with dpfuse.patch():
        assert DistributedDataParallel(mlp(), check_training="off")._options.common["check_training"] == "off"


def modes(model, rank, steps, mode_of):
    """Train so many steps in the modes that `mode_of` gives each rank; return the steps in which L08 was said."""
    findings.forget()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), []
    for step, (x, y) in enumerate(batches(rank, steps)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LoopWarning)
            model.train(mode_of(step))
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found += [step for each in caught if isinstance(each.message, LoopWarning) and each.message.code == "DPF-L08"]
    return found


@pytest.mark.parametrize("from_step", [1, 60])
def test_a_rank_that_switches_its_mode_is_named_within_four_steps(rank, size, from_step):
    def mode_of(step):
        return rank == 0 or step < from_step

    (step,) = modes(dpfuse.DataParallel(mlp()), rank, from_step + 20, mode_of)
    assert step <= max(from_step, 3) + 4


def test_of_the_modes_only_one_that_differs_is_told(rank, size):
    findings.forget()
    model = dpfuse.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LoopWarning)
        for x, y in batches(rank, 10):
            with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
                loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (text,) = [str(each.message) for each in caught if each.category is LoopWarning]
    this = "this rank among them" if rank == 1 else "this rank not"
    assert f"in different modes: 1 of 2 under autocast with bfloat16, {this}. Expected the same on every rank: " in text
    assert "with the same dtype" in text
    assert "train" not in text


def test_ranks_that_switch_together_are_compared_ever_less_often(rank, size):
    model = dpfuse.DataParallel(mlp())
    question = model._sync.loop._modes.question
    with mock.patch.object(question, "answer", wraps=question.answer) as compared:
        assert modes(model, rank, 100, lambda step: step % 2 == 0) == []
    assert compared.call_count == 4  # after 1, 8, 16 and 32 averages more


def rates(model, rank, steps, rate_of):
    """Train so many steps with the learning rates of each rank; return the steps in which L07 was said."""
    findings.forget()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step, (x, y) in enumerate(batches(rank, steps)):
        optimizer.param_groups[0]["lr"] = rate_of(step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found += [step for each in caught if getattr(each.message, "code", "") == "DPF-L07"]
    return found


@pytest.mark.parametrize("from_step", [1, 60])
def test_a_rank_that_changes_its_rate_is_named_within_four_steps(rank, size, from_step):
    def rate_of(step):
        return 0.02 if rank == 1 and step >= from_step else 0.01

    (step,) = rates(dpfuse.DataParallel(mlp(), check_training="warn"), rank, from_step + 20, rate_of)
    assert step <= max(from_step, 3) + 4


def test_ranks_with_one_schedule_are_compared_ever_less_often(rank, size):
    model = dpfuse.DataParallel(mlp())
    question = model._sync.loop._rates.question
    with mock.patch.object(question, "answer", wraps=question.answer) as compared:
        assert rates(model, rank, 100, lambda step: 0.01 / (1 + step)) == []
    assert compared.call_count == 4  # after 1, 8, 16 and 32 averages more


@pytest.mark.parametrize("from_step", [0, 57, 60])
def test_batches_that_become_the_same_on_all_ranks_are_named_within_24_steps(rank, size, from_step):
    findings.forget()
    input_comparison._all.clear()
    model = dpfuse.DataParallel(mlp())
    optimizer, said = torch.optim.SGD(model.parameters(), lr=0.01), []
    own, common = batches(rank, 100), batches(7, 100)
    for step in range(100):
        x, y = next(own if step < from_step else common)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LoopWarning)
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        said += [(step, each.message.code) for each in caught if isinstance(each.message, LoopWarning)]
    ((step, code),) = said
    assert code == "DPF-L05"
    assert step <= from_step + 24


def same_inputs(rank, steps, drop):
    """What is warned of, and noted, where all ranks have the same inputs and this dropout draws its own numbers."""
    findings.forget()
    input_comparison._all.clear()
    torch.manual_seed(rank if drop else 0)
    model = dpfuse.DataParallel(nn.Sequential(mlp(), nn.Dropout(drop)))
    torch.manual_seed(rank)
    with mock.patch.object(findings, "note") as note, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LoopWarning)
        train(*with_sgd(model), batches(0, steps))
    texts = [call.args[2] for call in note.call_args_list]
    return [each.message.code for each in caught if isinstance(each.message, LoopWarning)], texts


def test_equal_inputs_go_to_the_log_where_the_gradients_differ(rank, size):
    """A loader without a sampler, and dropout that differs: as little as of parts of one batch is known of it."""
    warned, noted = same_inputs(rank, 24, 0.3)
    assert warned == []
    (text,) = noted
    assert f"rank {rank}: in 8 steps in a row, hashes of all inputs of the model were equal on all ranks" in text
    assert "The gradients of the ranks differ, as where each rank takes its part of the batch in forward" in text


def test_equal_inputs_are_warned_of_also_with_a_module_that_could_draw(rank, size):
    assert same_inputs(rank, 24, 0.0) == (["DPF-L05"], [])


def test_what_was_noted_is_still_told():
    findings.forget()
    with mock.patch.object(LOOP, "info") as said, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LoopWarning)
        for _ in range(2):
            findings.note("DPF-L05", 0, "maybe.")
        for _ in range(2):
            findings.tell("DPF-L05", "certainly.", "warn")
        findings.note("DPF-L05", 0, "maybe.")
    assert said.call_count == len(caught) == 1


def test_ranks_that_seem_to_have_equal_batches_compare_them_ever_less_often(rank, size):
    """Their inputs differ in what the model does not use."""
    model = dpfuse.DataParallel(mlp())
    question = model._sync.loop._batches.question
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with mock.patch.object(question, "answer", wraps=question.answer) as compared, warnings.catch_warnings():
        warnings.simplefilter("error", LoopWarning)
        for x, y in batches(7, 100):
            loss_of(model(torch.cat([x, torch.full_like(x[:1], rank)]))[:-1], y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 1 < compared.call_count <= 4


@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
@pytest.mark.parametrize("width", [64, 1024, 16384])
def test_a_rank_finds_its_batch_equal_wherever_its_gradient_is_packed(rank, size, face, width):
    """With its bucket, or as soon as it is ready; from 2 MB on, private ones travel in their own memory."""
    model = face(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, width)))
    question = model._sync.loop._batches.question
    with mock.patch.object(question, "answer", wraps=question.answer) as compared:
        for step in range(32):
            torch.manual_seed(step)
            model(torch.cat([torch.randn(4, 8), torch.full((1, 8), rank)]))[:-1].square().mean().backward()
            model.zero_grad()
    assert compared.call_count == 1


def test_rates_of_layers_of_a_rank_alone_are_its_own(rank, size):
    model, own = dpfuse.DataParallel(mlp()), torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": own.parameters(), "lr": 0.1 * (1 + rank)}], lr=0.01
    )
    findings.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoopWarning)
        for x, _ in batches(rank, 24):
            own(model(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_one_rank_has_no_check(group):
    assert dpfuse.DataParallel(mlp())._sync.loop is None


def test_another_level_is_refused():
    with pytest.raises(ValueError, match="check_training must be one of 'raise', 'warn', 'log', 'off', got True"):
        dpfuse.DataParallel(mlp(), check_training=True)


def operations_of(rank, count, level):
    """Torch operations of a step, behind the steps in which ranks compare something."""
    model = dpfuse.DataParallel(nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)]), check_training=level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(30):
        with Operations() as done:
            model(torch.full((2, 3), (1.0 + step) * (1 + rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return len(done.names)


def test_a_settled_step_has_no_operation_more(rank, size):
    for count in (5, 20):
        assert operations_of(rank, count, "raise") == operations_of(rank, count, "off")
