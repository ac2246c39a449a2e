"""What this machine offers to ranks: backends, GPUs, cores. Starts nothing and opens no GPU."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = [
    "check_backend",
    "check_one_rank_each",
    "choose_backend",
    "cpu_count",
    "device_variables",
    "gpus_of_ranks",
    "select_gpus",
    "visible_gpus",
]


def check_backend(name: str, source: str) -> str:
    """Return `name` if torch can use this backend on this machine.

    Args:
        name: of the backend, or of one for each device type.
        source: what the error calls the argument.

    Raises:
        ValueError: torch does not know the backend, or it needs a GPU and there is none.
    """
    known = [known for known in dist.Backend.backend_list if known != dist.Backend.UNDEFINED]
    for part in name.split(","):
        backend = part.rpartition(":")[2].strip().lower()
        if backend not in known:
            close = difflib.get_close_matches(backend, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"{source}: got {name!r}, expected one of {', '.join(sorted(known))}{hint}")
        if backend == "nccl" and not torch.cuda.is_available():
            raise ValueError(
                f"{source}: got {name!r}, but torch sees no GPU here and NCCL needs one for each rank. "
                "Use 'gloo', which runs on the CPU."
            )
    return name


def choose_backend() -> str:
    """Return DPFUSE_BACKEND if it is set; else "nccl" with GPUs, and "gloo" without."""
    wanted = os.environ.get("DPFUSE_BACKEND")
    if wanted:
        return check_backend(wanted, "DPFUSE_BACKEND")
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def visible_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_one_rank_each(cards: Sequence[str], nprocs: int, source: str, count_source: str) -> None:
    """Raise ValueError unless there is one rank for each card; the sources are what the error calls both arguments."""
    if nprocs != len(cards):
        raise ValueError(
            f"{source} names {len(cards)} card(s), but {count_source} is {nprocs}; expected the same number. Leave "
            f"{count_source} out, or name one card for each rank."
        )


def device_variables(nprocs: int, cards: Sequence[str] | None) -> dict[str, str]:
    """Return the variables that share out this machine's cores and cards among `nprocs` ranks.

    Args:
        nprocs: the number of ranks.
        cards: those that the ranks may use; None for all that are visible.
    """
    variables = {}
    if "OMP_NUM_THREADS" not in os.environ and nprocs > 1:
        # All ranks together have no more threads than there are cores.
        variables["OMP_NUM_THREADS"] = str(max(1, cpu_count() // nprocs))
    if cards is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    return variables


def gpus_of_ranks(cards: Sequence[str] | None) -> int:
    """Return the number of GPUs that ranks with these `device_variables` see."""
    return visible_gpus() if cards is None else min(len(cards), visible_gpus())


def select_gpus(gpus: str | Sequence[int | str], source: str) -> list[str]:
    """Return the cards that `gpus` names, after checking that they exist.

    Args:
        gpus: physical cards: "0,1", or a list such as [0, 1]; identifiers ("GPU-…") if CUDA_VISIBLE_DEVICES uses
            them.
        source: what the error calls the argument, such as "--gpus".

    Returns:
        One name for each card, in the given order, as in CUDA_VISIBLE_DEVICES. A machine without GPUs returns the
        same list, with one warning: the same number of ranks runs on the CPU.
    """
    if isinstance(gpus, str):
        parts: Sequence[object] = gpus.split(",")
    elif isinstance(gpus, Sequence):
        parts = gpus
    else:
        raise TypeError(f'{source}: got {gpus!r}, expected cards such as "0,1" or [0, 1]')
    cards = [str(part).strip() for part in parts]
    if not cards or not all(card.isdigit() or card.startswith(("GPU-", "MIG-")) for card in cards):
        raise ValueError(f'{source}: got {gpus!r}, expected card numbers separated by commas, such as "0,1"')
    cards = [str(int(card)) if card.isdigit() else card for card in cards]
    twice = sorted({card for card in cards if cards.count(card) > 1})
    if twice:
        raise ValueError(f"{source}: card {', '.join(twice)} is named twice in {gpus!r}; name each card once")
    if not torch.cuda.is_available():
        warnings.warn(
            f"{source}: torch sees no GPU here, so {len(cards)} gloo rank(s) run on the CPU instead",
            UserWarning,
            stacklevel=3,
        )
        return cards
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        present, where = (
            [card.strip() for card in allowed.split(",")],
            f"CUDA_VISIBLE_DEVICES={allowed!r} shows",
        )
    else:
        present, where = [str(index) for index in range(torch.cuda.device_count())], "this machine has"
    missing = [card for card in cards if card not in present]
    if missing:
        raise ValueError(
            f"{source}: got {gpus!r}, but card {', '.join(missing)} is not there: {where} "
            f"{', '.join(present)}. Name cards that are visible, or change CUDA_VISIBLE_DEVICES."
        )
    return cards
