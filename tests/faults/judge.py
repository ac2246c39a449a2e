"""What came of a fault, from what was seen of its ranks. Pure: no process, no tensor."""

from __future__ import annotations

from itertools import dropwhile
from typing import Any

from tests.faults.fault import Fault, Outcome, Run, Verdict

__all__ = ["judge"]

STEPS = 10  # so many without a word, after a wrong one, are silence, whatever ends the program
TOLERANCE = 2e-3  # of a gradient's largest element: float16 rounds to 1e-3, a wrong mean is off by far more


def judge(fault: Fault, run: Run, timeout: float) -> Verdict:
    """The verdict.

    Args:
        fault: what was done.
        run: what was seen.
        timeout: of the process group, in seconds: who needed it has hung.
    """
    told = [line for lines in run.told for line in lines]
    planted = min((line["at"] for line in told if "planted" in line), default=None)
    began = planted or min((line["at"] for line in told), default=0.0)
    judged = [rank for rank in range(len(run.codes)) if rank not in fault.victims]
    errors = [[line["at"] for line in run.told[rank] if "raised" in line] or [run.ended[rank]] for rank in judged]
    seconds = max(at for (at,) in errors) - began
    gone = max(run.ended[rank] for rank in judged) - began
    outcome, detail = _outcome(fault, run, judged, gone, timeout)
    return Verdict(outcome, round(seconds, 1), run.left, detail, round(gone, 1))


def _outcome(fault: Fault, run: Run, judged: list[int], gone: float, timeout: float) -> tuple[Outcome, str]:
    codes = [run.codes[rank] for rank in judged]
    said = "\n".join(f"rank {rank}, exit code {run.codes[rank]}: {_text(run, rank)}" for rank in range(len(run.codes)))
    well = not any(run.codes[rank] != 0 or not any("ended" in line for line in run.told[rank]) for rank in judged)
    wrong = [_from_the_first_wrong(lines) for lines in run.told]
    same = {str([line["same"] for line in lines if "same" in line]) for lines in run.told}
    late = f"gradients off by {max(map(max, filter(None, wrong)), default=0):.3g} of their largest element\n{said}"
    if any(wrong) and (well or max(map(len, wrong)) > STEPS):
        return Outcome.CORRUPT, late
    if None in run.codes:
        return Outcome.HANG, f"killed after {fault.limit} s\n{said}"
    if any(code is not None and code < 0 for code in codes):
        return Outcome.CRASH, said
    if well:
        if len(same) == 1 or fault.victims:
            return Outcome.RIGHT, said
        warned = fault.expected.words and all(word.lower() in said.lower() for word in fault.expected.words)
        return Outcome.WARNED if warned else Outcome.CORRUPT, f"ranks differ: {same}\n{said}"
    if not any(codes):
        return Outcome.UNNAMED, f"exit code 0 without having ended well\n{said}"
    if gone > timeout - 1:
        return Outcome.HANG, f"only the time-out of the process group ended it\n{said}"
    if any(wrong):
        return Outcome.LATE, late
    if not all(codes):
        return Outcome.UNNAMED, f"an error on some ranks only\n{said}"
    words = {rank: [word.format(peer=1 - rank) for word in fault.expected.words] for rank in judged}
    missing = {word for rank in judged for word in words[rank] if word.lower() not in _text(run, rank).lower()}
    if missing or not fault.expected.words:
        return Outcome.UNNAMED, f"not said: {sorted(missing)}\n{said}"
    return Outcome.NAMED, said


def _from_the_first_wrong(lines: list[dict[str, Any]]) -> list[float]:
    """How far off the gradients of a rank were, step by step, from the first that were wrong."""
    off = [line["off"] for line in lines if "off" in line]
    return list(dropwhile(lambda one: one <= TOLERANCE, off))


def _text(run: Run, rank: int) -> str:
    return run.printed[rank].strip()
