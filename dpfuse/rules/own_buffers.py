"""Buffers differ between ranks after each average: no rank has sent its own. It has no code."""

from __future__ import annotations

from collections.abc import Iterator

from dpfuse.rules.seen import Seen, Traces, common_steps, name_list
from dpfuse.rules.windows import last_of
from dpfuse.trace_file import MODULE_BUFFERS, hashes_in

__all__ = ["find"]


def find(traces: Traces) -> Iterator[Seen]:
    """Yield that it is so, for each model."""
    for model in traces[0].models:
        number, names = str(model["number"]), model.get("buffers", [])
        rows = [
            [last_of(trace.steps[step], MODULE_BUFFERS).get(number) for trace in traces.values()]
            for step in range(common_steps(traces))
        ]
        sent = [[hashes_in(text) for text in row if text is not None] for row in rows if None not in row]
        apart = [
            name
            for place, name in enumerate(names)
            if len(sent) > 1 and all(len({hashes[place] for hashes in row}) > 1 for row in sent)
        ]
        if apart:
            yield Seen(
                "buffers differ between ranks",
                f"{name_list(apart)} of model {number} ({model['class']}) differ between ranks after each average, so "
                "a checkpoint holds those of the rank that saves it. Leave out broadcast_buffers=False to have rank "
                "0's on all, or let torch.nn.SyncBatchNorm average statistics.",
            )
