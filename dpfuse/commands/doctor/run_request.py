"""What the doctor asks of the processes of a run, and the files by which both tell of the end. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["DONE", "OVER", "REQUEST", "UNWRAPPED", "RunRequest", "all_done"]

DONE, OVER = "done", "over"  # files: a rank has made its steps, of as many ranks as it says; the doctor has ended all
UNWRAPPED = "unwrapped"  # how the file of a rank begins that has a character for each step of which no trace has a line
REQUEST = "DPFUSE_DOCTOR_RUN"  # the variable that holds the request as JSON


@dataclass(frozen=True)
class RunRequest:
    """What the doctor wants from one run.

    Args:
        folder: for what the ranks write.
        wrapper: "torch", "dpfuse", "narrow" (dpfuse that sends 16 bits), "tuned" (dpfuse with its tuner) or "torch
            buckets" (torch with other buckets).
        steps: of an optimizer, after which the processes end.
        deep: steps with hashes of all gradients, in the beginning.
        own_ranks: whether the program starts the ranks, so that code of one of its processes runs after they end.
    """

    folder: str
    wrapper: str
    steps: int
    deep: int
    own_ranks: bool = False

    def variables(self) -> dict[str, str]:
        """Return the variables that carry it to the program."""
        return {REQUEST: json.dumps(asdict(self)), "DPFUSE_DOCTOR": "1"}


def all_done(folder: Path) -> bool:
    """Return whether all ranks of a run have made their steps."""
    done = list(folder.glob(f"{DONE}*"))
    return bool(done) and len(done) >= int(done[0].read_text())
