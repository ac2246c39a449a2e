"""ResumableIterableDataset: what workers yield, and what is refused. Resumed jobs are in test_resuming.py."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

import dpfuse
from dpfuse.data import ResumableIterableDataset
from tests.data.streams import Stream, iterable

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_change_nothing(workers):
    """Also where the last step has less than a batch for each rank, and none for some."""
    for length in (0, 7, 12, 13):
        for rank in range(2):
            plain, with_workers = (
                [batch.tolist() for batch in stream.track(loader)]
                for stream, loader in (iterable(length, 3, 2, rank), iterable(length, 3, 2, rank, num_workers=workers))
            )
            assert plain == with_workers


def test_workers_that_persist_hear_of_the_next_epoch():
    stream, loader = iterable(8, 2, 2, 0, num_workers=2, persistent_workers=True)
    epochs = [[batch.tolist() for batch in stream.track(loader)] for _ in range(3)]
    assert epochs == [[[0, 2], [4, 6]], [[1, 3], [5, 7]], [[2, 4], [6, 0]]]
    stream.set_epoch(0)
    loop = stream.track(loader)
    assert next(loop).tolist() == [0, 2]
    loop.close()
    assert [batch.tolist() for batch in stream.track(loader)] == [[4, 6]]


def test_drop_last_leaves_out_what_does_not_fill_a_batch_on_every_rank():
    for length, full in ((7, 1), (8, 2), (3, 0)):
        for rank in range(2):
            stream = ResumableIterableDataset(Stream(length), 2, 2, rank, drop_last=True)
            assert len([*stream.track(DataLoader(stream, batch_size=2))]) == full


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, "dataset must give samples, again for each epoch, got generator", {"dataset": (n for n in "ab")}),
        (TypeError, "dataset must give samples, again for each epoch, got int", {"dataset": 3}),
        (ValueError, "batch_size must be at least 1, got 0", {"batch_size": 0}),
        (TypeError, "drop_last must be True or False, got 1", {"drop_last": 1}),
        (TypeError, "rank must be an integer, got '0'", {"rank": "0"}),
    ],
)
def test_bad_arguments_are_named(error, words, changes):
    given = {"dataset": Stream(3), "batch_size": 2, "num_replicas": 2, "rank": 0} | changes
    with pytest.raises(error, match=words):
        ResumableIterableDataset(**given)


def test_loaders_that_would_be_counted_wrongly_are_refused():
    stream = ResumableIterableDataset(Stream(9), 2, 1, 0)
    with pytest.raises(ValueError, match="loader is a DataLoader with a Stream as its dataset, expected this one"):
        stream.track(DataLoader(Stream(9), batch_size=2))
    for wrong in ({"batch_size": 3}, {"batch_size": 2, "drop_last": True}, {"batch_size": 2, "in_order": False}):
        with pytest.raises(ValueError, match="expected 2, False and True"):
            stream.track(DataLoader(stream, **wrong))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_position_that_no_loop_counts_is_not_saved(workers):
    stream, loader = iterable(6, 2, 1, 0, num_workers=workers)
    next(iter(loader))
    with pytest.raises(dpfuse.DPFuseError, match="batches were taken that were not counted"):
        stream.state_dict()
    next(stream.track(loader))
    assert stream.state_dict() == {"epoch": 0, "seen": 2}
