"""torch's arguments about buckets, and what they mean for a plan. Knows no process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpfuse.engine.plan import DEFAULT_SIZE, MB, BucketRule, size_in_bytes
from dpfuse.model.named_params import named_with_ties

__all__ = ["BucketSizes", "rule_of"]

SMALL_CAP_MB = 1


@dataclass(frozen=True)
class BucketSizes:
    """`bucket_cap_mb` and `bucket_cap_mb_list` as torch reads them: a list wins, and asks for no small bucket.

    Example:
        >>> from dpfuse.ddp.torch_buckets import BucketSizes
        >>> BucketSizes.of(None, [1, 5])
        BucketSizes(cap_mb=5, small_mb=5, caps=(1048576, 5242880))
    """

    cap_mb: float
    small_mb: float
    caps: tuple[float, ...] = ()  # bytes

    @classmethod
    def of(cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> BucketSizes:
        """The two arguments, checked.

        Raises:
            TypeError: no number, or no sequence of numbers.
            ValueError: a negative number, or NaN.
        """
        if cap_mb_list is not None and (isinstance(cap_mb_list, str) or not isinstance(cap_mb_list, Sequence)):
            raise TypeError(
                f"bucket_cap_mb_list must be a list of sizes in MB, got {cap_mb_list!r} of type "
                f"{type(cap_mb_list).__name__}; pass for example [1, 25], or bucket_cap_mb for one size"
            )
        if cap_mb_list:
            caps = tuple(size_in_bytes(cap, "each of bucket_cap_mb_list") for cap in cap_mb_list)
            return cls(max(cap_mb_list), max(cap_mb_list), caps)
        if cap_mb is None:
            return cls(DEFAULT_SIZE, SMALL_CAP_MB)
        size_in_bytes(cap_mb, "bucket_cap_mb")
        return cls(cap_mb, cap_mb)

    @property
    def is_default(self) -> bool:
        """Whether no size was passed: only then is there a small bucket."""
        return self.small_mb < self.cap_mb

    @property
    def in_bytes(self) -> int:
        """What torch.compile splits the graph by; its optimizer refuses less than one MB."""
        return max(MB, int(min(self.cap_mb, 1 << 40) * MB))


def rule_of(
    sizes: BucketSizes,
    module: nn.Module,
    delayed: Iterable[tuple[str, Tensor]] | None,
    behind: Any,
) -> BucketRule:
    """The wishes in `bucket_cap_mb_list`, `delay_all_reduce_named_params` and `param_to_hook_all_reduce`.

    Args:
        sizes: the first of them.
        module: whose parameters the others are.
        delayed: names and parameters, or None.
        behind: a parameter; None if and only if `delayed` is.

    Raises:
        TypeError: `delayed` is not made of pairs.
        ValueError: only one of the two is given; a name or parameter is not the module's.
        RuntimeError: `behind` is frozen.
    """
    if (delayed is None) != (behind is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time. Got "
            f"{'only the second' if delayed is None else 'only the first'}; pass the other, or leave out both."
        )
    if delayed is None:
        return BucketRule(sizes.caps)
    named = dict(named_with_ties(module))
    hooked = next((name for name, param in module.named_parameters() if param is behind), None)
    if hooked is None:
        raise ValueError(
            f"param_to_hook_all_reduce must be a parameter of the module, got one of type {type(behind).__name__} that "
            "is not; pass one that becomes ready when the delayed ones are to be sent"
        )
    if not behind.requires_grad:
        raise RuntimeError(
            f"param_to_hook_all_reduce is {hooked!r}, which is frozen, so its gradient never becomes ready: cannot "
            "register a hook on a tensor that doesn't require gradient. Pass a trainable one."
        )
    try:
        pairs = [(name, param) for name, param in delayed]
    except (TypeError, ValueError):
        raise TypeError(
            f"delay_all_reduce_named_params must be pairs of a name and a parameter, got {type(delayed).__name__}; "
            "pass some of module.named_parameters()"
        ) from None
    apart: dict[int, None] = {}
    for name, param in pairs:
        if named.get(name) is not param:
            raise ValueError(
                f"delay_all_reduce_named_params has {name!r}, which is not that parameter of the module; expected "
                "names and parameters as module.named_parameters() gives them"
            )
        apart[id(param)] = None
    # By the first of its names where a parameter has several.
    names = {id(param): name for name, param in module.named_parameters() if param.requires_grad}
    return BucketRule(sizes.caps, tuple(names[key] for key in apart if key in names), hooked)
