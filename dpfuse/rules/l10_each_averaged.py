"""DPF-L10: several backwards are averaged before each step, where one would do and much time would be saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dpfuse.rules.seen import Seen, Traces
from dpfuse.rules.windows import averages_of, class_of, is_averaged
from dpfuse.trace_file import HELD

__all__ = ["WORTH", "find"]

WORTH = 0.05  # of a step; below this nothing is advised


def find(traces: Traces, exposed: float, seconds: float) -> Iterator[Seen]:
    """Yield that it is so, for each optimizer and model.

    Args:
        traces: of a run.
        exposed: seconds of a step in which backward can only wait.
        seconds: of a step.
    """
    first = traces[0]
    for number in range(len(first.optimizers)):
        lines = [line for line in first.steps if line["optimizer"] == number]
        for model in sorted({model for line in lines for model in averages_of(line)}):
            lengths = {
                sum(is_averaged(one, model) for one in line["backwards"])
                for line in lines[1:]  # before the first one, a program may warm up
            }
            count = min(lengths, default=0) if _adds_up(lines[1:], model) else 1
            saved = exposed * (1 - 1 / max(count, 1))
            if len(lengths) == 1 and saved > WORTH * seconds:
                yield Seen(
                    "each backward is averaged",
                    f"{count} averaged backwards come before each of {len(lines)} steps of {class_of(first, number)}, "
                    "and their gradients are added up. With all but the last inside no_sync(), a step would save up "
                    f"to {1e3 * saved:.3g} of {1e3 * seconds:.3g} ms.",
                )


def _adds_up(lines: Sequence[dict[str, Any]], model: str) -> bool:
    """Whether each average before a step, but the first, adds to gradients: a closure that zeroes them does not."""
    for line in lines:
        averaged = [one for one in line["backwards"] if is_averaged(one, model)]
        if not all(any(one.get(HELD, {}).get(model, [1])) for one in averaged[1:]):
            return False
    return True
