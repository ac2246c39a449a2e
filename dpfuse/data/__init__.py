"""Samples for a job that may go on with another number of ranks, at a step inside an epoch, without loss or repetition.

`batch_sampler` is for data sets with a length, `iterable` for those without. Both deal the samples of an epoch to the
ranks by their `place` in the job, and keep a `position`, which is the same number on all ranks.
"""

from dpfuse.data.batch_sampler import ResumableBatchSampler
from dpfuse.data.iterable import ResumableIterableDataset

__all__ = ["ResumableBatchSampler", "ResumableIterableDataset"]
