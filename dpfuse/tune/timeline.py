"""The times at which the gradients of a backward are ready. Plain data; knows no model, no link and no bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from dpfuse.arguments import real
from dpfuse.engine.param_spec import ITEM_SIZE, ParamSpec, specs_of
from dpfuse.tune.cost import array_of

__all__ = ["Timeline"]


@dataclass(frozen=True)
class Timeline:
    """The times of one backward, as the planner needs them.

    Args:
        specs: the parameters, by registration index.
        ready: for each parameter the seconds from the begin of backward until its gradient was complete. For a
            parameter without gradient this is `backward_end`.
        backward_end: seconds from the begin of backward to its end.
        wire_dtype: name of the dtype that is sent; None sends each gradient in its own dtype.

    Raises:
        ValueError: There are no parameters, or not one time per parameter; a time is negative, not finite or after
            `backward_end`; or `wire_dtype` is unknown.

    Example:
        >>> import dpfuse
        >>> from dpfuse.tune import Timeline
        >>> specs = [dpfuse.ParamSpec(name, (1000,), "float32") for name in ("first", "second")]
        >>> timeline = Timeline(specs, ready=[0.004, 0.001], backward_end=0.005)
        >>> timeline.order, timeline.nbytes
        ((1, 0), (4000, 4000))
    """

    specs: tuple[ParamSpec, ...]
    ready: tuple[float, ...]
    backward_end: float
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(self.specs))
        object.__setattr__(self, "ready", tuple(map(float, self.ready)))
        object.__setattr__(self, "backward_end", float(self.backward_end))
        if not self.specs:
            raise ValueError("a timeline needs at least one parameter, got none")
        if len(self.ready) != len(self.specs):
            raise ValueError(
                f"got {len(self.ready)} ready times for {len(self.specs)} parameters; expected one for each"
            )
        if not (math.isfinite(self.backward_end) and self.backward_end >= 0):
            raise ValueError(f"backward_end must be seconds >= 0, got {self.backward_end!r}")
        for spec, ready in zip(self.specs, self.ready, strict=True):
            if not 0 <= ready <= self.backward_end:
                raise ValueError(
                    f"parameter {spec.name!r} was ready after {ready!r} s; expected a time between 0 and the end of "
                    f"backward at {self.backward_end!r} s, which is also the time of a parameter without gradient"
                )
        if self.wire_dtype is not None and self.wire_dtype not in ITEM_SIZE:
            raise ValueError(f"wire_dtype must be None or one of {', '.join(ITEM_SIZE)}, got {self.wire_dtype!r}")

    @classmethod
    def from_steps(
        cls,
        specs: Sequence[ParamSpec],
        ready: ArrayLike,
        backward_end: ArrayLike,
        *,
        wire_dtype: str | None = None,
    ) -> Timeline:
        """Return the typical backward of several recorded ones: mean over the ranks, median over the steps.

        Args:
            specs: the parameters, by registration index.
            ready: seconds, indexed by step, rank and parameter; NaN where there was no gradient.
            backward_end: seconds, indexed by step and rank.
            wire_dtype: name of the dtype that is sent.

        Raises:
            ValueError: The shapes of `ready`, `backward_end` and `specs` do not fit.

        Example:
            >>> import dpfuse
            >>> from dpfuse.tune import Timeline
            >>> specs = [dpfuse.ParamSpec("weight", (4,), "float32")]
            >>> steps = [[[1.0], [3.0]], [[9.0], [9.0]], [[1.0], [1.0]]]  # three steps of two ranks, one parameter
            >>> Timeline.from_steps(specs, steps, [[4.0, 4.0], [9.0, 9.0], [9.0, 9.0]]).ready
            (2.0,)
        """
        times, ends = array_of("ready", ready), array_of("backward_end", backward_end)
        if times.ndim != 3 or times.shape[:2] != ends.shape or not times.size:
            raise ValueError(
                f"ready has shape {times.shape} and backward_end {ends.shape}; expected (steps, ranks, parameters) "
                "and (steps, ranks), with at least one of each"
            )
        # If a rank has no gradient, the bucket waits for the end of its backward.
        times = np.where(np.isnan(times), ends[:, :, None], times)
        typical, end = np.median(times.mean(axis=1), axis=0), float(np.median(ends.mean(axis=1)))
        # Sums of equal numbers in another order may differ in the last digit.
        return cls(specs_of(specs), tuple(np.minimum(typical, end).tolist()), end, wire_dtype)

    @classmethod
    def synthetic(
        cls,
        specs: Sequence[ParamSpec],
        backward: float,
        *,
        work: Sequence[float] | None = None,
        wire_dtype: str | None = None,
    ) -> Timeline:
        """Return an estimated backward: gradients in reverse registration order, at times proportional to the work.

        Args:
            specs: the parameters, by registration index.
            backward: seconds of the whole backward.
            work: amount of computation per parameter, in any unit, such as FLOPs. The default is the number of
                elements, which suits networks of matrix products.
            wire_dtype: name of the dtype that is sent.

        Raises:
            ValueError: There is not one amount of work per parameter, an amount is negative, or all are zero.

        Example:
            >>> import dpfuse
            >>> from dpfuse.tune import Timeline
            >>> specs = [dpfuse.ParamSpec(name, (size,), "float32") for name, size in (("a", 100), ("b", 300))]
            >>> Timeline.synthetic(specs, 0.008).ready
            (0.008, 0.006)
        """
        specs = specs_of(specs)
        real("backward", backward)
        shares = array_of("work", [spec.numel for spec in specs] if work is None else work)
        if shares.shape != (len(specs),) or not (shares >= 0).all() or not 0 < shares.sum() < math.inf:
            raise ValueError(
                f"work must be one amount >= 0 for each of {len(specs)} parameters, and some above 0, got {work!r}"
            )
        done = np.cumsum(shares[::-1])
        ready = (done / done[-1])[::-1] * backward
        return cls(specs, tuple(ready.tolist()), backward, wire_dtype)

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each gradient in the dtype that is sent. A sparse gradient counts with its dense size."""
        return tuple(spec.numel * ITEM_SIZE[self.wire_dtype or spec.dtype] for spec in self.specs)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Parameter indices in the order of their ready times; at equal times the last registered comes first."""
        return tuple(sorted(range(len(self.specs)), key=lambda index: (self.ready[index], -index)))
