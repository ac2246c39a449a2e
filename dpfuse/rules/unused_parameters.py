"""Parameters that are trained get no gradient on any rank. It has no code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dpfuse.rules.seen import Seen, Traces, common_steps, name_list

__all__ = ["find"]


def find(traces: Traces, unused: Sequence[Mapping[str, Sequence[str]]], of_optimizers: str) -> Iterator[Seen]:
    """Yield that it is so, for each model.

    Args:
        traces: of a run, by rank.
        unused: of each rank, by the number of a model that got gradients, the names of parameters that got none.
        of_optimizers: what follows the number of steps where several optimizers have made them.
    """
    for model in traces[0].models:
        of_ranks = [one[str(model["number"])] for one in unused if str(model["number"]) in one]
        names = [name for name in model["names"] if of_ranks and all(name in each for each in of_ranks)]
        if names:
            yield Seen(
                "unused parameters",
                f"{name_list(names)} of model {model['number']} ({model['class']}) got no gradient on any rank in "
                f"{common_steps(traces)} steps{of_optimizers}; freeze them, or use them in the loss",
            )
