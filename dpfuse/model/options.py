"""What a wrapper was asked for. Knows no module and no process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpfuse.engine.averaging import Wire, averaging_for
from dpfuse.engine.plan import NO_WISHES, BucketRule

__all__ = ["SyncOptions"]

CHECKS = ("deferred", "strict")
FINITE_CHECKS = ("off", "warn", "raise")


@dataclass(frozen=True)
class SyncOptions:
    """The wrapper's options; sizes in MB of 1048576 bytes. Their meaning is documented where users pass them."""

    comm_buffer_size: float
    last_comm_buffer_size: float
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    broadcast_buffers: bool
    gradient_scale: float | None = None
    wire_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None  # mixed_precision's word for wire_dtype
    forward_dtype: torch.dtype | None = None  # in which the module computes; None is that of its parameters
    ignored: frozenset[str] = frozenset()  # parameters and buffers to leave alone, by name
    send_buffers_at_start: bool = True
    rule: BucketRule = NO_WISHES  # for the buckets
    stall_timeout: float = 60.0  # seconds
    autotune: bool = False  # whether the sizes are only those to begin with
    check_finite: str = "off"  # what is done about gradients that are not: one of FINITE_CHECKS
    checked: str = "deferred"  # when a CUDA model hears what the peers report: what users pass as `check`
    registered: bool = False  # whether buckets lie in memory that the back end has registered; the wrapper finds out
    deterministic: bool = False
    wire_reduce: str | None = None
    error_feedback: bool = False
    accumulate_in_buckets: bool = False
    grad_norm_in_backward: bool = False

    def check(self) -> None:
        """Raises TypeError or ValueError for a value that cannot be used; the planner checks the sizes."""
        if isinstance(self.comm_buffer_size, str):
            raise TypeError(
                f'comm_buffer_size must be a number of MB or "auto", got {self.comm_buffer_size!r} of type str; pass '
                "for example comm_buffer_size=25"
            )
        for name in (
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "broadcast_buffers",
            "deterministic",
            "error_feedback",
            "accumulate_in_buckets",
            "grad_norm_in_backward",
        ):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")
        if self.checked not in CHECKS:
            raise ValueError(
                f"check must be {' or '.join(map(repr, CHECKS))}, got {self.checked!r}; strict waits for the GPU in "
                "each backward"
            )
        try:
            averaging_for("float32", 1, self.gradient_scale)
        except (TypeError, ValueError) as error:
            raise type(error)(f"gradient_{error}") from None  # there the argument is called scale
        if self.gradient_scale is not None and not 1e-6 <= abs(self.gradient_scale) <= 1e6:
            raise ValueError(
                f"gradient_scale must be between 1e-6 and 1e6, or between -1e6 and -1e-6, got {self.gradient_scale!r}; "
                "beyond that 16-bit gradients vanish or overflow. Scale the loss, or leave it out for the mean."
            )
        if isinstance(self.stall_timeout, bool) or not isinstance(self.stall_timeout, (int, float)):
            raise TypeError(
                f"stall_timeout must be a number of seconds, got {self.stall_timeout!r} of type "
                f"{type(self.stall_timeout).__name__}; pass for example stall_timeout=60.0"
            )
        if not self.stall_timeout > 0:
            raise ValueError(
                f"stall_timeout must be > 0 s, got {self.stall_timeout!r}; float('inf') waits for silent ranks for ever"
            )
        if None not in (self.wire_dtype, self.reduce_dtype) and self.wire_dtype != self.reduce_dtype:
            raise ValueError(
                f"wire_dtype={self.wire_dtype!r} was passed, and mixed_precision reduces gradients in "
                f"{self.reduce_dtype}; expected one of the two. Set reduce_dtype, and leave wire_dtype out."
            )
        Wire.of(self.wire_dtype, self.wire_reduce, deterministic=self.deterministic)
        if self.error_feedback and not self.wire.narrows:
            raise ValueError(
                f"error_feedback=True was passed with wire_dtype={self.wire_dtype!r}, expected a narrow wire: nothing "
                "is rounded away that could be sent later. Pass for example wire_dtype=torch.bfloat16, or leave "
                "error_feedback out."
            )
        if self.accumulate_in_buckets and self.wire.narrows:
            raise ValueError(
                "accumulate_in_buckets=True adds gradients up in the buffer that travels, in float32, but they are to "
                f"travel in torch.{self.wire.dtype}; expected torch.float32 or None as wire_dtype (reduce_dtype of "
                "mixed_precision). Leave out one of the two."
            )
        if self.check_finite not in FINITE_CHECKS:
            raise ValueError(
                f"check_finite must be one of {', '.join(map(repr, FINITE_CHECKS))}, got {self.check_finite!r}; "
                "leave it out to send gradients unseen"
            )

    @property
    def wire(self) -> Wire:
        """How gradients travel."""
        dtype = self.wire_dtype or self.reduce_dtype or (torch.float32 if self.accumulate_in_buckets else None)
        return Wire.of(dtype, self.wire_reduce)

    @property
    def wants_params_alone(self) -> bool:
        """Whether another wrapper of the same parameters would spoil what this one does."""
        return self.gradient_scale is not None or self.accumulate_in_buckets or self.grad_norm_in_backward

    @property
    def of_communication(self) -> str | None:
        """An option that says how gradients are added up, if there is one: what a communication hook decides itself."""
        if self.deterministic:
            return "deterministic=True"
        if self.accumulate_in_buckets:
            return "accumulate_in_buckets=True"
        if self.error_feedback:
            return "error_feedback=True"
        if self.wire_reduce is not None:
            return f"wire_reduce={self.wire_reduce!r}"
        return None if self.wire_dtype is None else f"wire_dtype={self.wire_dtype}"
