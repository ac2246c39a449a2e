"""Wishes for the buckets beyond two sizes: a cap for each, and parameters that are to be sent later. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BucketRule"]


@dataclass(frozen=True)
class BucketRule:
    """How buckets are made where two sizes do not say it all; the default has no wishes.

    Example:
        >>> from dpfuse.bucket_rule import BucketRule
        >>> BucketRule(caps=(1 << 20, 25 << 20))
        BucketRule(caps=(1048576, 26214400), delayed=(), behind='')
    """

    caps: tuple[float, ...] = ()  # bytes, in the order of communication, the last repeats; in place of the sizes
    delayed: tuple[str, ...] = ()  # parameters that get buckets of their own, behind that of
    behind: str = ""  # this parameter
