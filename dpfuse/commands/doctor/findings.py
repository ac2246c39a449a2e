"""What is wrong with the program, apart from its numbers: warnings and errors of dpfuse, and what traces show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpfuse.commands.doctor.runs import Run

__all__ = ["Finding", "findings_of"]

DIFFER, SAME = "the weights of the ranks differ", "the same batches on every rank"
CHECKED = {DIFFER: "DPF-W01", SAME: "DPF-L05"}  # dpfuse's own checks find these, too, and say more
SHOWN = 3  # names of a list


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        code: such as "DPF-W01"; empty where there is none.
        title: in a few words.
        text: what was got, what was expected, and what to do.
        where: the runs in which it was seen.
    """

    code: str
    title: str
    text: str
    where: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def findings_of(runs: Sequence[Run]) -> tuple[Finding, ...]:
    """Return what is wrong, in the order in which it was seen; the same thing in several runs counts once.

    Args:
        runs: all of the doctor's.
    """
    found: dict[tuple[str, str], Finding] = {}
    said = [(run, finding) for run in runs for finding in _said(run)]
    codes = {finding.code for _, finding in said}
    traced = [(run, one) for run in runs for one in _traced(run) if CHECKED.get(one.title, "untold") not in codes]
    for run, finding in (*said, *traced):
        # With a code, the text may name other steps in each run.
        key = (finding.code, "" if finding.code else finding.text)
        kept = found.get(key, finding)
        if run.title not in kept.where:
            found[key] = Finding(kept.code, kept.title, kept.text, (*kept.where, run.title))
    return tuple(found.values())


def _said(run: Run) -> Iterator[Finding]:
    """Yield what dpfuse has warned of in a run, or raised."""
    seen: set[str] = set()
    for facts in run.facts.values():
        for note in facts["findings"]:
            if note["what"] == "error" and not note["code"]:
                continue  # the end of a run, which is told of otherwise
            if note["kind"] in ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning"):
                continue
            text = note["text"].removeprefix(f"{note['code']}: ") if note["code"] else note["text"]
            key = note["code"] or text
            if key not in seen:
                seen.add(key)
                kind = "an error" if note["what"] == "error" else "a warning"
                yield Finding(note["code"], f"{kind} of dpfuse ({note['kind']})", text, ())


def _traced(run: Run) -> Iterator[Finding]:
    traces = run.traces
    if not traces or not run.steps:
        return
    first = traces[0]
    ranks = len(traces)
    if first.settings["ranks"] == 1:
        text = "the process group has one rank, so nothing is averaged; start several ranks, or leave the wrapper out"
        yield Finding("", "a group of one rank", text, ())
    for model in first.models:
        unused = _never_used(run, model)
        if unused:
            text = (
                f"{_names(unused)} of model {model['number']} ({model['class']}) got no gradient on any rank in the "
                "steps that were hashed; freeze them, or use them in the loss"
            )
            yield Finding("", "unused parameters", text, ())
    if ranks < 2:
        return
    for step in range(run.steps):
        lines = [trace.steps[step] for trace in traces.values()]
        name = "parameters" if "parameters" in lines[0] else "all_parameters"
        if len({line[name] for line in lines}) > 1:
            names = first.optimizers[lines[0]["optimizer"]]["names"]
            differ = [
                one
                for index, one in enumerate(names)
                if name == "parameters" and len({line[name][8 * index : 8 * index + 8] for line in lines}) > 1
            ]
            text = (
                f"after step {step} the ranks hold different weights{f' in {_names(differ)}' if differ else ''}, "
                "expected equal ones; is each wrapped, trained by the same optimizer, and loaded on every rank?"
            )
            yield Finding("", DIFFER, text, ())
            break
    if _same_batches(run):
        text = (
            "all ranks got the same inputs in every step, so they compute the same; give each rank its own part of the "
            "data, such as with torch's DistributedSampler"
        )
        yield Finding("", SAME, text, ())


def _never_used(run: Run, model: dict[str, Any]) -> list[str]:
    key, used, seen = str(model["number"]), set[int](), False
    for trace in run.traces.values():
        for line in trace.steps:
            for backward in line["backwards"]:
                hashes = backward.get("local", {}).get(key)
                if hashes is not None:
                    seen = True
                    used |= {index for index in range(len(model["names"])) if hashes[8 * index] != "-"}
    return [name for index, name in enumerate(model["names"]) if index not in used] if seen else []


def _same_batches(run: Run) -> bool:
    count = 0
    for step in range(run.steps):
        rows = [[one["inputs"] for one in trace.steps[step]["forwards"]] for trace in run.traces.values()]
        if any(row != rows[0] for row in rows):
            return False
        count += len(rows[0])
    return count > 1


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
