"""The kinds of random programs, by name: what makes a program of a seed, for a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from tests.random_programs.frozen_parts import FrozenParts
from tests.random_programs.long_windows import LongWindows
from tests.random_programs.mesh_programs import MeshProgram
from tests.random_programs.program import Program, run
from tests.random_programs.renamed_children import RenamedChildren
from tests.random_programs.several_models import SeveralModels
from tests.random_programs.shared_buffers import SharedBuffers

__all__ = ["KINDS", "MESH", "makes", "wrong_ones"]

KINDS: dict[str, Callable[..., Any]] = {
    "whole": partial(Program, sharded=False),
    "sharded": partial(Program, sharded=True),
    "several models": SeveralModels,
    "frozen parts": FrozenParts,
    "shared buffers": SharedBuffers,
    "long windows": LongWindows,
    "renamed children": RenamedChildren,
}
MESH = "in a mesh"  # of two dimensions, on four ranks


def makes(kind: str, rank: int, size: int) -> Callable[[int], Any]:
    """Return what makes the program of a seed on this rank; to be called on every rank."""
    if kind == MESH:
        return partial(MeshProgram, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp")))
    return partial(KINDS[kind], rank, size)


def wrong_ones(rank: int, size: int, kind: str, seeds: Sequence[int]) -> list[str]:
    """Run these programs, on every rank; return what the wrong ones have done."""
    make, wrong = makes(kind, rank, size), []
    for seed in seeds:
        try:
            run([seed], make)
        except AssertionError as error:  # on every rank
            wrong.append(str(error))
    return wrong
