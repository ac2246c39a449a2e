"""DPF-L04: parameters get gradients step after step, and no optimizer steps on them."""

from __future__ import annotations

from collections.abc import Sequence

from dpfuse.rules.seen import Seen, Traces, common_steps, name_list
from dpfuse.rules.windows import full_name
from dpfuse.trace_file import ABSENT, hashes_in

__all__ = ["AVERAGES", "BEGIN", "LATER", "find", "is_left_out", "text_of", "unstepped"]

BEGIN = 2  # averages, after which weights are copied
AVERAGES = 20  # after that, until they are compared
LATER = 1000  # averages, until parameters are told of for which an optimizer may begin late
NAMED = 5  # parameters
SHORT = {"torch.float16", "torch.bfloat16"}


def is_left_out(*, has_gradient: bool, is_stepped: bool, may_have_copy: bool) -> bool:
    """Whether a parameter gets gradients that no optimizer uses.

    Args:
        has_gradient: whether it got one.
        is_stepped: whether an optimizer that has stepped has it.
        may_have_copy: whether its optimizer may step on a copy in float32. Such a one changes a weight of 16 bits after
            many steps only.
    """
    return has_gradient and not (is_stepped or may_have_copy)


def text_of(rank: int, averages: int, names: Sequence[str], count: int, nbytes: int, optimizers: Sequence[str]) -> str:
    """Return what a training says.

    Args:
        rank: of this process.
        averages: since it began to look.
        names: of the parameters that no optimizer has.
        count: of all parameters of the model.
        nbytes: of the gradients of those parameters.
        optimizers: the names of the classes that have stepped.
    """
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"rank {rank}: {LATER if averages >= LATER else AVERAGES:,} backwards averaged gradients of "
        f"{len(names)} of {count} parameters, {', '.join(map(repr, names[:NAMED]))}{more}, and no optimizer that "
        f"has stepped ({', '.join(optimizers)}) has them. Their weights did not change. That is {nbytes:,} bytes of "
        "each backward. Expected an optimizer of the parameters of this model: make it from the wrapped model, not "
        "from another copy, or call its step(). Freeze what is not to be trained (requires_grad=False)."
    )


def find(traces: Traces, of_optimizers: str) -> Seen | None:
    """Say that some parameters are in no optimizer. Another one may begin later, so it is no more than a remark.

    Args:
        traces: of a run, by rank.
        of_optimizers: what follows the number of steps where several optimizers have made them.
    """
    names = unstepped(traces)
    if not names:
        return None
    return Seen(
        "parameters that no optimizer has",
        f"{name_list(names)} got gradients, and in {common_steps(traces)} steps{of_optimizers} no optimizer has "
        "stepped on them, though one has on others of the model. Expected all of them in an optimizer: pass "
        "model.parameters(), or freeze them.",
    )


def unstepped(traces: Traces) -> list[str]:
    """Return the parameters with gradients that are in no optimizer, of models of which one has stepped on a part.

    Where optimizers have none of a model, they step on copies, or the model is trained later. Each rank may have the
    optimizer of its own part. A parameter whose weights change is stepped under another name, or by other code.

    Args:
        traces: of a run, by rank.
    """
    stepped = {name for trace in traces.values() for one in trace.optimizers for name in one["names"]}
    found: list[str] = []
    for model in traces[0].models:
        number = str(model["number"])
        names = [full_name(number, name) for name in model["names"]]
        averages = _hashes(traces, "backwards", "averaged", number)
        weights = _hashes(traces, "forwards", "weights", number)
        short = [dtype in SHORT for dtype in model.get("dtypes", [""] * len(names))]
        graded = {name for row in averages for name, each in zip(names, row, strict=True) if each != ABSENT}
        if stepped.isdisjoint(graded):
            continue
        for place, name in enumerate(names):
            if (
                is_left_out(has_gradient=name in graded, is_stepped=name in stepped, may_have_copy=short[place])
                and len({row[place] for row in weights}) < 2
            ):
                found.append(name)
    return found


def _hashes(traces: Traces, kind: str, field: str, model: str) -> list[list[str]]:
    """Return the hashes of a model's parameters in each forward or backward of the first rank that has them."""
    lines = (one.get(field, {}) for line in traces[0].steps for one in line[kind])
    return [hashes_in(one[model]) for one in lines if model in one]
