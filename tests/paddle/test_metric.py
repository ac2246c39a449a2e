"""Accuracy, over several batches and of one, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpfuse.paddle.metric import Accuracy, Metric, accuracy

SCORES = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])
LABELS = torch.tensor([2, 1, 0, 0])  # best class right, second, third, right


@pytest.mark.parametrize(
    "labels", [LABELS, LABELS[:, None], torch.nn.functional.one_hot(LABELS)], ids=["[N]", "[N, 1]", "one-hot"]
)
def test_labels_come_in_three_shapes(labels):
    metric = Accuracy(topk=(1, 2))
    hits = metric.compute(SCORES, labels)
    assert hits.tolist() == [[1, 0], [0, 1], [0, 0], [1, 0]]
    assert hits.dtype == torch.float32
    assert metric.update(hits) == [0.5, 0.75]


def test_batches_of_different_sizes_are_weighed_by_their_samples():
    metric = Accuracy()
    assert metric.update(metric.compute(SCORES[:1], LABELS[:1])) == 1.0
    assert metric.update(metric.compute(SCORES[1:], LABELS[1:])) == pytest.approx(1 / 3)
    assert metric.accumulate() == 0.5
    metric.reset()
    assert metric.accumulate() == 0.0


def test_an_array_or_an_empty_batch_may_be_counted():
    metric = Accuracy()
    metric.update(np.array([[1.0], [0.0]]))
    assert metric.update(torch.zeros(0, 1)) == 0.0
    assert metric.accumulate() == 0.5


def test_one_row_of_scores_for_each_place_in_a_sequence():
    metric = Accuracy()
    metric.update(metric.compute(SCORES.view(2, 2, 3), LABELS.view(2, 2, 1)))
    assert metric.accumulate() == 0.5


def test_more_than_there_are_classes_is_all_of_them():
    metric = Accuracy(topk=(1, 5))
    metric.update(metric.compute(SCORES, LABELS))
    assert metric.accumulate() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["acc"]),
        ({"topk": 1, "name": "right"}, ["right"]),
        ({"topk": (1, 5)}, ["acc_top1", "acc_top5"]),
        ({"topk": [5], "name": "top"}, ["top_top5"]),
    ],
)
def test_names_are_paddles(options, names):
    assert Accuracy(**options).name() == names


@pytest.mark.parametrize(
    ("topk", "error"), [((), ValueError), ((0,), ValueError), ((1.0,), TypeError), ((True,), TypeError)]
)
def test_topk_without_sense_is_named(topk, error):
    with pytest.raises(error, match="topk"):
        Accuracy(topk=topk)


def test_labels_that_do_not_fit_the_scores_are_named():
    with pytest.raises(ValueError, match=r"label has shape \(3, 1\) for scores of shape \(4, 3\)"):
        Accuracy().compute(SCORES, LABELS[:3])
    with pytest.raises(ValueError, match=r"label has shape \(\)"):
        accuracy(SCORES, torch.tensor(1))


@pytest.mark.parametrize("labels", [LABELS, LABELS[:, None]])
def test_the_function_counts_one_batch(labels):
    correct, total = torch.zeros(1, dtype=torch.int64), torch.zeros((), dtype=torch.int32)
    result = accuracy(SCORES, labels, k=2, correct=correct, total=total)
    assert result.shape == ()
    assert result.item() == 0.75
    assert (correct.item(), total.item()) == (3, 4)
    with pytest.raises(ValueError, match="k must be at least 1"):
        accuracy(SCORES, labels, k=0)
    with pytest.raises(TypeError, match="k must be"):
        accuracy(SCORES, labels, k=1.5)


def test_a_metric_of_ones_own_gets_outputs_and_labels():
    class Largest(Metric):
        def reset(self):
            self.value = 0.0

        def update(self, outputs, labels):
            self.value = max(self.value, (outputs - labels).abs().max().item())

        def accumulate(self):
            return self.value

        def name(self):
            return "largest"

    metric = Largest()
    metric.reset()
    metric.update(*metric.compute(torch.tensor([1.0, 4.0]), torch.tensor([0.0, 1.0])))
    assert metric.accumulate() == 3.0
    with pytest.raises(TypeError, match="abstract"):
        Metric()
