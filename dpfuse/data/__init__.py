"""Samples for a job that may go on with another number of ranks, at a step inside an epoch, without loss or repetition.

`batch_sampler` is for data sets with a length, `iterable` for those without. Both deal the samples of an epoch to the
ranks by their `place` in the job, and keep a `position`, which is the same number on all ranks. `micro_batch_sampler`
deals the micro-batches of `fixed_micro_batches=`, whose samples a `seeded_dataset` makes the same on any rank. The
`order` of samples with numbers is that of torch.
"""

from dpfuse.data.batch_sampler import ResumableBatchSampler
from dpfuse.data.iterable import ResumableIterableDataset
from dpfuse.data.micro_batch_sampler import MicroBatchSampler
from dpfuse.data.seeded_dataset import SeededDataset

__all__ = ["MicroBatchSampler", "ResumableBatchSampler", "ResumableIterableDataset", "SeededDataset"]
