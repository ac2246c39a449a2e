"""What a program that fails under torch's DDP does under dpfuse: what dpfuse says, or survives, is the diagnosis."""

from __future__ import annotations

from collections.abc import Iterator

from dpfuse.commands.doctor.findings import Finding
from dpfuse.commands.doctor.runs import Run

__all__ = ["outcome", "reasons"]

ALONE, SAID = "some ranks alone call the model", "an error of dpfuse"


def outcome(run: Run) -> str:
    """Return what became of the program under dpfuse, as a sentence without a full stop."""
    if any(one.title == SAID for one in reasons(run)):
        return f"under dpfuse, in run {run.number}, an error of dpfuse ends it, which says why"
    if run.failed:
        return f"under dpfuse, in run {run.number}, it fails as well: {run.reason()}"
    return f"under dpfuse, in run {run.number}, it makes all its {run.steps} steps{run.of_optimizers}"


def reasons(run: Run) -> Iterator[Finding]:
    """Yield why the program may fail under torch's DDP.

    Args:
        run: under dpfuse, of a program that fails under torch's DDP.
    """
    for rank, facts in run.facts.items():
        for note in facts["findings"]:
            if run.failed and note["what"] == "error" and note["kind"].startswith("DPFuse") and not note["code"]:
                who = f"rank {rank}" if rank.isdecimal() else "a rank"
                text = f"{who} raised {note['kind']}: {note['text']}"
                yield Finding("", SAID, text, (run.title,), rank=int(rank) if rank.isdecimal() else None)
                return
    if run.failed:
        return
    counts = {rank: sum(facts["evaluated"].values()) for rank, facts in sorted(run.facts.items()) if rank.isdecimal()}
    if len(set(counts.values())) > 1:
        most = max(counts, key=lambda rank: counts[rank])
        line = next(iter(run.facts[most]["evaluated"]))
        each = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
        text = (
            f"the wrapped model was called without a backward, for an evaluation or a sample, {each} times ({line}). "
            "Under torch's DDP each call may send buffers, and the other ranks do not take part. Expected that all "
            "ranks call the wrapper equally often: call it on every rank, or call `model.module` on the one"
        )
        yield Finding("", ALONE, f"{text}.", (run.title,))
