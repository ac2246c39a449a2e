"""Sizes of buckets that overlap well with backward: small at both ends of the order, full between them."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["ON_CPU", "ON_GPU", "ON_SHARED_CORES", "Ramp", "ramp_limits"]


class Ramp(NamedTuple):
    """The numbers of the rule. How they were chosen: docs/reference/records.md."""

    parts: int = 5  # a full bucket has this part of the model, if its cap allows it
    end: int = 3  # the first bucket sent, and the last one, have this part of a full bucket
    growth: float = 2  # from one bucket to the next, from both ends towards the middle
    least: float = 1 << 19  # bytes of a full bucket, at least
    ranks: int = 1024  # beyond so many, the least grows with the square root of the number of ranks
    # Bytes of the model for one more byte of the cap, where the program has passed none. While backward runs, the raw
    # gradients of a bucket live until it is packed: so the worst moment needs about a tenth of all gradients more.
    share: float = 10


ON_GPU = Ramp()
ON_CPU = Ramp(parts=4, end=4, least=1 << 22)  # a collective on CPUs takes time from backward itself
# Of one machine: there nothing overlaps, so few buckets are best. Those above 25 MB took longer.
ON_SHARED_CORES = ON_CPU._replace(least=math.inf, share=math.inf)


def ramp_limits(total: int, cap: float, last_cap: float, ranks: int, ramp: Ramp = ON_GPU) -> list[float]:
    """Return the bytes that close each bucket, from the one that is sent last to the one that is sent first.

    The first bucket is small, so that the network starts early. The last one is small, so that little is left to send
    when backward ends. The more ranks there are, the longer a collective takes to start, and the larger is the smallest
    bucket that pays.

    Args:
        total: bytes of all gradients.
        cap: bytes of a full bucket, at most.
        last_cap: bytes of the bucket that is sent last, at most.
        ranks: their number; 0 asks for no ramp.
        ramp: the numbers of the rule.

    Returns:
        Without a ramp two limits, of which the second repeats. They are `[last_cap, cap]` if `ranks` is 0, or if `cap`
        is infinite or less than the least. For a model that is smaller than the smallest full bucket, the first is
        `1 / ramp.end` of the model at most, unless `last_cap` allows a single bucket. For any other model the bytes are
        `total` together.

    Example:
        >>> from dpfuse.engine.bucket_sizes import ramp_limits
        >>> MB = 1 << 20
        >>> [limit / MB for limit in ramp_limits(60 * MB, 25 * MB, MB, ranks=2)]
        [1.0, 4.0, 8.0, 11.0, 12.0, 12.0, 8.0, 4.0]

    Source: ours. Megatron-LM's default bucket grows with the number of ranks, too.
    """
    least = ramp.least * math.sqrt(max(1.0, ranks / ramp.ranks))
    if not ranks or cap == math.inf:
        return [last_cap, cap]
    if total < least:
        return [last_cap if total <= last_cap else min(last_cap, math.ceil(total / ramp.end)), cap]
    if cap < ramp.least:
        return [last_cap, cap]
    full = min(cap, max(total / ramp.parts, least))
    front, back = list[float](), list[float]()
    end = full / ramp.end
    rising, falling = end, min(last_cap, end)
    while total > 0:
        size = max(1, math.ceil(min(rising, falling, total)))
        if rising <= falling:
            front.append(size)
            rising = min(rising * ramp.growth, full)
        else:
            back.append(size)
            falling = min(max(falling * ramp.growth, end), full)
        total -= size
    return [*back, *front[::-1]]
