"""Which options, calls and objects exclude each other: one table. Knows no module; callers say what is in use.

A name in the table is that of an option, or of something else that a user has called or made. Or it is a property of
an option, such as a wire of 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpfuse.errors import DPFuseError

__all__ = ["EXCLUSIONS", "Exclusion", "refuse"]


@dataclass(frozen=True)
class Exclusion:
    """A row of the table: `one` excludes each of `others`."""

    one: str
    others: tuple[str, ...]
    reason: str  # as the end of a sentence
    remedy: str  # sentences; `{option}` is the name of the option that is in use


OF_SUMS = ("deterministic", "accumulate_in_buckets", "error_feedback", "wire")
OF_WHOLE = ("metrics", "ShardedOptimizer", "wire of another dtype", "indivisible parameter")
OF_STEPS = ("GradScaler", "accumulate_in_buckets", "find_unused_parameters")
PART = "each rank has only a part of the gradients"
OF_OTHER_SUMS = (
    *OF_SUMS, "narrow wire", "check_finite", "metrics", "gradient_scale", "mixed_precision",
    "auto",
)  # fmt: skip
OF_CALLS = ("hook", "weight", "step_in_backward", "GradScaler", "autotune", "DTensor", "join", "no_sync")
LEAVE_ONE = "Leave out one of the two."
BESIDE_DTENSORS = ("accumulate_in_buckets", "check_finite raises", "metrics")
EXCLUSIONS = (
    Exclusion(
        "wire",
        ("another reduce_dtype",),
        "both say in which dtype gradients travel",
        "Set reduce_dtype, and leave the other out.",
    ),
    Exclusion(
        "accumulate_in_buckets",
        ("narrow wire",),
        "gradients are added up in float32, in the buffer that travels",
        "Leave out one of the two, or let torch.float32 travel.",
    ),
    Exclusion(
        "fixed_micro_batches",
        OF_OTHER_SUMS,
        "gradients are added in one tree, in float32, and divided by the number of micro-batches",
        LEAVE_ONE,
    ),
    Exclusion(
        "fixed_micro_batches",
        OF_CALLS,
        "the gradients of a fixed number of micro-batches are added in one tree",
        "docs/train/same_bits.md lists what works beside fixed_micro_batches.",
    ),
    Exclusion(
        "fixed_micro_batches",
        ("broadcast_buffers",),
        "ranks may run different numbers of forwards, which may write no buffer",
        "Leave {option} out: buffers are sent when the module is wrapped.",
    ),
    Exclusion("given plan", ("bucket rule",), "the plan says which parameters travel together", LEAVE_ONE),
    Exclusion("bucket_cap_mb_list", ("auto",), 'plan="auto" looks for the sizes', LEAVE_ONE),
    Exclusion("hook", OF_SUMS, "a hook adds up as it likes", "Leave {option} out, or register no hook."),
    Exclusion(
        "hook", ("ShardedOptimizer",), "a hook returns whole gradients", "Use a plain optimizer, or register no hook."
    ),
    Exclusion(
        "hook",
        ("autotune",),
        "autotune measures the all-reduces that a hook replaces",
        "Choose the buffer sizes by hand, or register the hook once the tuning is done.",
    ),
    Exclusion("autotune", ("float8 wire",), "it measures all-reduces", "Choose the sizes by hand, or use 16 bits."),
    Exclusion("weight", ("gradient_scale",), "weights make a mean", "Leave gradient_scale out."),
    Exclusion("weight", ("hook",), "a hook averages as it likes", "Multiply the loss, and divide in the hook."),
    Exclusion(
        "weight",
        ("ShardedOptimizer",),
        PART,
        "Multiply the loss with the weight, divided by the mean of the weights of all ranks.",
    ),
    Exclusion("ShardedOptimizer", OF_WHOLE, PART, LEAVE_ONE),
    Exclusion(
        "ShardedOptimizer",
        ("several threads",),
        "threads divide the part of a rank at places that depend on the number of ranks",
        "Leave DPFUSE_THREADS out, or use a plain optimizer.",
    ),
    Exclusion("step_in_backward", OF_STEPS, "parameters are updated before backward has ended", LEAVE_ONE),
    Exclusion(
        "DTensor",
        (*BESIDE_DTENSORS, "autotune", "GradScaler", "ShardedOptimizer", "mixed_precision"),
        "what it finds would differ between the ranks that have parts of one parameter",
        "Leave out one of the two. docs/train/tensor_parallel.md lists what works beside DTensors.",
    ),
    Exclusion(
        "join",
        ("ShardedOptimizer",),
        "a rank without input takes no part in step()",
        "Give each rank as many batches, or use a plain optimizer.",
    ),
    Exclusion(
        "join",
        ("buffer hook after the forward",),
        "ranks without input run no forward",
        "Register the hook with PRE_FORWARD, or none.",
    ),
)


def refuse(asked: str, begin: str, in_use: Mapping[str, str], error: type[Exception] = DPFuseError) -> None:
    """Raise `error` if something in use excludes what a user asks for.

    Args:
        asked: its name in the table.
        begin: the begin of the text, up to "with".
        in_use: what is in use: its name in the table, and words for the text. Names that the table lacks do no harm.
    """
    for row in EXCLUSIONS:
        for other in row.others:
            partner = other if asked == row.one else row.one if asked == other else ""
            if partner in in_use:
                words = in_use[partner]
                remedy = row.remedy.format(option=words.partition("=")[0])
                raise error(f"{begin} {words}, expected one of the two: {row.reason}. {remedy}")
