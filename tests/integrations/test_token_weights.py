"""What `TokenWeights` does with the batches of a Trainer, on one process; test_token_means.py runs real ones."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.integrations.token_weights import TokenWeights

CPU = torch.device("cpu")


class Trainer:
    """What `TokenWeights` uses of one. `counts` is whether the model takes the number of items."""

    def __init__(self, processes=1, process=0, remainder=-1, ended=True, counts=True):
        loader = SimpleNamespace(batch_sampler=SimpleNamespace(even_batches=True))
        state = SimpleNamespace(end_of_dataloader=ended, remainder=remainder, active_dataloader=loader)
        self.accelerator = SimpleNamespace(num_processes=processes, process_index=process, gradient_state=state)
        self.args = SimpleNamespace(average_tokens_across_devices=True)
        self.model_wrapped = nn.Linear(1, 1)
        self.counts = counts

    def get_batch_samples(self, iterator, number, device):
        return [batch for batch, _ in zip(iterator, range(number), strict=False)], None

    def _get_num_items_in_batch(self, batches, device):
        return sum(batch["labels"].ne(-100).sum() for batch in batches) if self.counts else None

    def training_step(self, model, inputs, num_items_in_batch=None):
        return self.compute_loss(model, inputs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return (2.0, "outputs") if return_outputs else 2.0


class Weighing(TokenWeights, Trainer):
    """With the weights that the model was given."""

    def __init__(self, **how):
        super().__init__(**how)
        self.weights = []

    def _weigh(self, items):
        self.weights.append(int(items))


def batch(*labels):
    return {"input_ids": torch.arange(len(labels)), "labels": torch.tensor(labels)}


def test_repeated_samples_of_the_last_batch_are_taken_out():
    for process, kept, weight in ((0, [1, 2, 3], 5), (1, [1], 3), (2, [1], 2)):
        trainer = Weighing(processes=3, process=process, remainder=4)
        batches, items = trainer.get_batch_samples(iter([batch(5, 6), batch(1, 2, 3)]), 2, CPU)
        assert batches[0]["labels"].tolist() == [5, 6]
        assert batches[1]["labels"].tolist() == kept
        assert (trainer.weights, int(items)) == ([weight], weight)
        shares = [trainer.training_step(None, one) for one in batches]
        assert shares == ([2.0, 0.0] if process == 2 else [2.0, 2.0])


def test_a_rank_without_any_sample_in_a_step_has_no_weight_and_divides_by_one():
    trainer = Weighing(processes=2, process=1, remainder=1)
    batches, items = trainer.get_batch_samples(iter([batch(1, 2)]), 2, CPU)
    assert (trainer.weights, int(items), len(batches)) == ([0], 1, 1)


@pytest.mark.parametrize("how", [{"ended": False, "remainder": 1}, {"remainder": -1}, {"remainder": 0}])
def test_other_batches_stay_whole(how):
    batches, _ = Weighing(processes=2, process=1, **how).get_batch_samples(iter([batch(1, 2)]), 1, CPU)
    assert len(batches[0]["labels"]) == 2


def test_a_batch_of_which_accelerate_repeats_nothing_stays_whole():
    trainer = Weighing(processes=2, process=1, remainder=1)
    trainer.accelerator.gradient_state.active_dataloader.batch_sampler.even_batches = False
    batches, _ = trainer.get_batch_samples(iter([batch(1, 2)]), 1, CPU)
    assert len(batches[0]["labels"]) == 2


def test_means_of_batches_count_as_their_items():
    trainer = Weighing(counts=False)
    batches, items = trainer.get_batch_samples(iter([batch(1, -100, 2), batch(3, -100)]), 2, CPU)
    assert (trainer.weights, items) == ([3], None)
    assert [float(trainer.training_step(None, one)) for one in batches] == pytest.approx([2 * 4 / 3, 2 * 2 / 3])
    assert trainer.compute_loss(None, batches[0]) == 2.0  # in an evaluation


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
    trainer = Weighing(processes=2, process=1, remainder=1)
    flat = {"input_ids": torch.ones(1, 7), "labels": torch.ones(3)}
    with pytest.warns(UserWarning, match=re.escape("entries of the lengths [1, 3], expected one for each sample")):
        batches, _ = trainer.get_batch_samples(iter([flat]), 1, CPU)
    assert batches == [flat]


@pytest.mark.slow
def test_a_loss_that_the_accelerator_cannot_weigh_is_refused(group):
    pytest.importorskip("accelerate")
    from accelerate.utils import GradientAccumulationPlugin

    from dpfuse.integrations.accelerate import DPFuseAccelerator

    accelerator = DPFuseAccelerator(cpu=True)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', got 'none'"):
        accelerator.backward(loss, num_items=1, reduction="none")
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
