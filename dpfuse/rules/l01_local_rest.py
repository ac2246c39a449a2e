"""DPF-L01: a step uses a mean over the ranks to which backwards of one rank alone have added.

All ranks may have added the same, such as a replayed batch. So this is a suspicion, and the ranks compare their weights
after the step. Where these are equal each time, such steps are looked at ever less often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["RARELY", "Looks", "note", "wants_look"]

RARELY = 64  # steps between two looks, at most


@dataclass(frozen=True)
class Looks:
    """What is remembered of steps on such gradients.

    Args:
        changed: how many in a row were found to use other values, as those that the program has averaged itself.
        between: so many of them pass between the next two suspicions.
        left: so many pass before the next look.
    """

    changed: int = 0
    between: int = 1
    left: int = 0


def wants_look(memory: Looks) -> bool:
    """Whether `note` needs to know if the values are still there. To look waits for the device."""
    return not memory.left and not memory.changed & (memory.changed - 1)


def note(
    memory: Looks, optimizer: str, parameter: str, backwards: int, line: str, *, kept: bool
) -> tuple[Looks, str | None]:
    """Return what is remembered after a step on a gradient that has got more since its last average, and the suspicion.

    Args:
        memory: of the steps before.
        optimizer: the name of its class.
        parameter: the name of the one whose gradient it is.
        backwards: how many have written it since that average.
        line: the user's line of the last of them; empty where it is not known.
        kept: whether its values are what the last of them has left; False where no look is wanted.
    """
    if memory.left:
        return replace(memory, left=memory.left - 1), None
    if not kept:
        return replace(memory, changed=memory.changed + 1), None
    one = backwards == 1
    local = "one backward that was" if one else f"{backwards} backwards that were"
    place = f" ({'at' if one else 'the last at'} {line})" if line else ""
    return Looks(between=min(2 * memory.between, RARELY), left=memory.between - 1), (
        f"{optimizer} has stepped on gradients that are not the mean over the ranks. A synchronised backward has "
        f"written the gradient of {parameter!r}, and then {local} not synchronised{place}; expected the "
        "synchronised backward as the last one before the step. The forward decides: enter no_sync(), or set "
        "require_backward_grad_sync, before the forward of each batch, and synchronise the last batch before the "
        "step."
    )
