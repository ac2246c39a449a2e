"""What `TokenWeights` does with the batches of a Trainer, on one process; test_token_means.py runs real ones."""

from __future__ import annotations

import re
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler

import dpfuse
from dpfuse.integrations.token_weights import TokenWeights

CPU = torch.device("cpu")


class Trainer:
    """What `TokenWeights` uses of one.

    `counts` is whether the model takes the number of items; `samples` those of the sampler, of which `size` are in a
    batch.
    """

    def __init__(self, processes=1, process=0, samples=0, size=2, ended=True, counts=True):
        places = {"num_processes": processes, "process_index": process}
        sampler = BatchSampler(range(samples), size, drop_last=False)
        shard = SimpleNamespace(
            even_batches=True, split_batches=False, drop_last=False, batch_sampler=sampler, **places
        )
        loader = SimpleNamespace(batch_sampler=shard)
        state = SimpleNamespace(end_of_dataloader=ended, remainder=-1, active_dataloader=loader)
        self.accelerator = SimpleNamespace(gradient_state=state, backward=self.backward, **places)
        self.args = SimpleNamespace(average_tokens_across_devices=True)
        self.model_wrapped = nn.Linear(1, 1)
        self.counts = counts
        self.losses = []

    def get_batch_samples(self, iterator, number, device):
        return [batch for batch, _ in zip(iterator, range(number), strict=False)], None

    def _get_num_items_in_batch(self, batches, device):
        return sum(batch["labels"].ne(-100).sum() for batch in batches) if self.counts else None

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.accelerator.backward(2.0)
        return 2.0

    def backward(self, loss):
        self.losses.append(float(loss))


class Weighing(TokenWeights, Trainer):
    """With the weights that the model was given."""

    def __init__(self, **how):
        super().__init__(**how)
        self.weights = []

    def _weigh(self, items):
        self.weights.append(int(items))


def batch(*labels):
    return {"input_ids": torch.arange(len(labels)), "labels": torch.tensor(labels)}


@pytest.mark.parametrize("resumed", [False, True])
def test_repeated_samples_of_the_last_batch_are_taken_out(resumed):
    """Of 13 samples 4 are in the last step, of which the first rank has 3, and the last one none."""
    for process, kept, weight in ((0, [1, 2, 3], 5), (1, [1], 3), (2, [1], 2)):
        trainer = Weighing(processes=3, process=process, samples=13, size=3)
        if resumed:
            loader = trainer.accelerator.gradient_state.active_dataloader
            loader.batch_sampler = SimpleNamespace(batch_sampler=loader.batch_sampler)
        batches, items = trainer.get_batch_samples(iter([batch(5, 6), batch(1, 2, 3)]), 2, CPU)
        assert batches[0]["labels"].tolist() == [5, 6]
        assert batches[1]["labels"].tolist() == kept
        assert (trainer.weights, int(items)) == ([weight], weight)
        logged = [trainer.training_step(None, one) for one in batches]
        assert trainer.losses == logged == ([2.0, 0.0] if process == 2 else [2.0, 2.0])


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("kind", [list, tuple, dict, Pair])
def test_batches_of_any_kind_are_cut(kind):
    samples = [{"x": torch.ones(1)}, {"x": torch.zeros(1)}]
    batches = {list: samples, tuple: (torch.arange(2), torch.arange(2)), dict: {"x": torch.arange(2), "y": [3, 4]}}
    batches[Pair] = Pair(torch.arange(2), torch.arange(2))
    trainer = Weighing(processes=2, samples=5, counts=False)
    (cut,), _ = trainer.get_batch_samples(iter([batches[kind]]), 1, CPU)
    assert isinstance(cut, kind)
    assert {len(part) for part in (cut.values() if kind is dict else [cut] if kind is list else cut)} == {1}
    assert trainer.weights == [1]


def test_a_rank_that_deals_the_batches_has_counted_the_samples():
    for process, kept in ((0, 2), (1, 1), (2, 1)):
        trainer = Weighing(processes=3, process=process)
        state = trainer.accelerator.gradient_state
        state.remainder, state.active_dataloader = 3, SimpleNamespace(slice_fn=len, batch_sampler=None)
        batches, _ = trainer.get_batch_samples(iter([batch(1, 2)]), 1, CPU)
        assert len(batches[0]["labels"]) == kept
        assert trainer.weights == [max(3 - 2 * process, 0) if process else 2]


def test_a_rank_without_any_sample_in_a_step_has_no_weight_and_divides_by_one():
    trainer = Weighing(processes=2, process=1, samples=1)
    batches, items = trainer.get_batch_samples(iter([batch(1, 2)]), 2, CPU)
    assert (trainer.weights, int(items), len(batches)) == ([0], 1, 1)


@pytest.mark.parametrize("how", [{"ended": False, "samples": 5}, {"samples": 8}, {"samples": 7, "process": 0}])
def test_other_batches_stay_whole(how):
    how = {"process": 1, "processes": 2} | how
    batches, _ = Weighing(**how).get_batch_samples(iter([batch(1, 2)]), 1, CPU)
    assert len(batches[0]["labels"]) == 2


class Twos(BatchSampler):
    """Has a rule of its own."""

    def __iter__(self):
        yield from zip(self.sampler, self.sampler, strict=True)


class Endless:
    """A sampler without a length."""


@pytest.mark.parametrize(
    "change",
    [
        {"even_batches": False},
        {"drop_last": True},
        {"batch_sampler": Twos(range(5), 2, drop_last=False)},
        {"batch_sampler": BatchSampler(Endless(), 2, drop_last=False)},
        {"batch_sampler": None},
    ],
)
def test_a_batch_stays_whole_if_accelerate_repeats_nothing_or_it_cannot_be_known(change):
    trainer = Weighing(processes=2, process=1, samples=5)
    vars(trainer.accelerator.gradient_state.active_dataloader.batch_sampler).update(change)
    batches, _ = trainer.get_batch_samples(iter([batch(1, 2)]), 1, CPU)
    assert len(batches[0]["labels"]) == 2


def test_a_loader_of_torch_repeats_nothing():
    trainer = Weighing()
    loader = trainer.accelerator.gradient_state.active_dataloader
    loader.batch_sampler = loader.batch_sampler.batch_sampler  # as accelerate leaves it on one process
    batches, _ = trainer.get_batch_samples(iter([batch(1, 2)]), 1, CPU)
    assert len(batches[0]["labels"]) == 2


def loss(*_args, **_how):
    """A function for the loss."""


@pytest.mark.parametrize(
    ("counts", "how", "factors"),
    [
        # The Trainer divides means by the number of batches, 2, unless it is told that they add up.
        (False, {}, (2 * 2 / 3, 2 * 1 / 3)),
        (False, {"loss_is_scaled_for_ga": False}, (2 * 2 / 3, 2 * 1 / 3)),
        (False, {"loss_is_scaled_for_ga": True}, (1, 1)),
        (False, {"compute_loss_func": loss}, (2 / 3, 1 / 3)),
        (False, {"compute_loss_func": "a word that says: do not divide"}, (1, 1)),
        (False, {"compute_loss_func": loss, "loss_is_scaled_for_ga": True}, (1, 1)),
        (True, {}, (1, 1)),
        (True, {"compute_loss_func": loss}, (1, 1)),
        (True, {"loss_is_scaled_for_ga": False}, (2 * 2 / 3, 2 * 1 / 3)),
    ],
)
def test_means_of_batches_count_as_their_items(counts, how, factors):
    trainer = Weighing(samples=4, counts=counts)
    vars(trainer).update(how)
    batches, items = trainer.get_batch_samples(iter([batch(1, -100, 2), batch(3, -100)]), 2, CPU)
    assert (trainer.weights, items) == ([3], 3 if counts else None)
    logged = [float(trainer.training_step(None, one)) for one in batches]
    assert trainer.losses == logged == pytest.approx([2.0 * factor for factor in factors])
    trainer.accelerator.backward(2.0)
    assert trainer.losses[-1] == 2.0  # in anything else


def test_a_training_step_that_leaves_out_that_of_its_base_is_named():
    trainer = Weighing(samples=4)
    trainer.get_batch_samples(iter([batch(1), batch(2)]), 2, CPU)
    with pytest.raises(dpfuse.DPFuseError, match=r"none of the 2 batches of a step was trained by TokenWeights\.train"):
        trainer.get_batch_samples(iter([batch(1)]), 1, CPU)


def test_a_step_that_an_exception_has_ended_is_begun_again():
    """As a Trainer does that looks for a size of batches which memory allows."""
    trainer = Weighing(samples=4)
    batches, _ = trainer.get_batch_samples(iter([batch(1), batch(2)]), 2, CPU)
    trainer.training_step(None, batches[0])
    trainer.get_batch_samples(iter([batch(1)]), 1, CPU)
    assert trainer.weights == [2, 1]


def test_samples_are_counted_where_there_are_no_labels():
    trainer = Weighing(counts=False)
    trainer.get_batch_samples(iter([{"x": torch.ones(3, 2)}, {"x": torch.ones(1, 2)}]), 2, CPU)
    assert trainer.weights == [4]


def test_no_batch_is_no_step():
    trainer = Weighing()
    assert trainer.get_batch_samples(iter([]), 2, CPU) == ([], None)
    assert trainer.weights == []


def test_the_counts_of_the_ranks_are_not_added_up_twice():
    assert Weighing().args.average_tokens_across_devices is False


class Tuner(TokenWeights, Trainer):
    """Gives the weights to its model."""


def test_a_model_of_another_library_is_refused_where_there_are_other_ranks():
    Tuner().get_batch_samples(iter([batch(1)]), 1, CPU)
    with pytest.raises(dpfuse.DPFuseError, match="Tuner trains a Linear, expected that accelerate has wrapped"):
        Tuner(processes=2).get_batch_samples(iter([batch(1)]), 1, CPU)


def test_a_batch_that_cannot_be_cut_is_told_of():
    trainer = Weighing(processes=2, samples=5)
    flat = {"input_ids": torch.ones(1, 7), "labels": torch.ones(3)}
    with pytest.warns(UserWarning, match=re.escape("lengths [1, 3], expected one for each of its 2 samples")):
        batches, _ = trainer.get_batch_samples(iter([flat]), 1, CPU)
    assert batches == [flat]
    # On the other rank all of it is repeated.
    trainer = Weighing(processes=2, process=1, samples=5)
    assert trainer.get_batch_samples(iter([flat]), 1, CPU) == ([flat], 1)
    assert trainer.weights == [0]


@pytest.mark.slow
def test_a_loss_that_the_accelerator_cannot_weigh_is_refused(group):
    pytest.importorskip("accelerate")
    from accelerate.utils import GradientAccumulationPlugin

    from dpfuse.integrations.accelerate import DPFuseAccelerator

    accelerator = DPFuseAccelerator(cpu=True)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', got 'none'"):
        accelerator.backward(loss, num_items=1, reduction="none")
    with pytest.raises(ValueError, match="must be finite, and 0 or more, got -1"):
        accelerator.backward(loss, num_items=-1)
    with pytest.raises(dpfuse.DPFuseError, match="prepare\\(\\) was given 0 models, expected one"):
        accelerator.backward(loss, num_items=1)
    accelerator.backward(loss)
    models = [accelerator.prepare(nn.Linear(1, 1)) for _ in range(2)]
    with pytest.raises(dpfuse.DPFuseError, match="prepare\\(\\) was given 2 models, expected one"):
        accelerator.backward(loss, num_items=1)
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = DPFuseAccelerator(cpu=True, gradient_accumulation_plugin=plugin)
    models = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(dpfuse.DPFuseError, match="num_items with sync_each_batch=True"):
        accelerator.backward(models(torch.ones(1, 1)).sum(), num_items=1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [int, torch.tensor])
def test_a_step_without_any_item_has_gradients_of_zero_on_one_process(count):
    pytest.importorskip("accelerate")
    from dpfuse.integrations.accelerate import DPFuseAccelerator

    accelerator = DPFuseAccelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    for sizes, expected in (((0, 0), 0.0), ((0, 2), 3.0), ((1, 3), 3.0)):
        for size in sizes:
            with accelerator.accumulate(model):
                loss = model(torch.full((size, 1), 3.0)).sum()
                accelerator.backward(loss, num_items=count(size), reduction="sum")
        assert model.weight.grad.item() == expected
        model.zero_grad()
