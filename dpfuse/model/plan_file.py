"""Plans that last: what a file of a plan holds, and whether a plan fits a model. Sends nothing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpfuse.arguments import instance
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import PLAN_FORMAT, BucketPlan
from dpfuse.model.plan_from_groups import plan_from_groups

__all__ = ["RULES", "fitted", "given_plan", "load_plan", "plan_digest"]

RULES = ("ramp", "greedy", "auto")  # what a user can name in place of a plan; "auto" begins as "ramp"
REMEDY = "Make the file again with plan.save()"


def load_plan(path: str | os.PathLike[str]) -> BucketPlan:
    """Read a plan that `BucketPlan.save` wrote. Nothing in the file is executed.

    Args:
        path: the file.

    Returns:
        The plan, on the CPU. `DataParallel(module, plan=...)` takes it, or the path itself.

    Raises:
        ValueError: the file is no such plan, is damaged, or has another format.
        OSError: the file cannot be read.

    Example:
        >>> import dpfuse, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "plan.json"
        >>> dpfuse.plan_buckets([dpfuse.ParamSpec("w", (8,), "float32")]).save(path)
        >>> dpfuse.load_plan(path).buckets[0].nbytes
        32
    """
    instance("path", path, (str, os.PathLike), "the path of a file that plan.save() wrote")
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
        found = facts["format"] if isinstance(facts, dict) else None
    except (ValueError, KeyError):  # a UnicodeDecodeError is a ValueError
        found = None
    if found != PLAN_FORMAT:
        got = "no plan" if found is None else f"format {found!r}"
        raise ValueError(f"plan file {os.fspath(path)!r}: got {got}, expected format {PLAN_FORMAT!r}. {REMEDY}.")
    try:
        specs = [
            ParamSpec(str(name), tuple(map(int, shape)), str(dtype), sparse=bool(sparse))
            for name, shape, dtype, sparse in facts["parameters"]
        ]
        return plan_from_groups(specs, [list(map(int, group)) for group in facts["buckets"]])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"plan file {os.fspath(path)!r} is damaged: got {type(error).__name__}: {error}; expected each parameter "
            f"with its shape in exactly one bucket. {REMEDY}."
        ) from None


def given_plan(value: Any) -> BucketPlan | None:
    """Return the plan that a user passed as the option `plan`; None for the name of a rule.

    Raises:
        TypeError: neither a name, nor a plan, nor a path.
        ValueError: there is no such rule and no such file, or the file is not a plan.
    """
    if isinstance(value, BucketPlan):
        return value
    if value in RULES:
        return None
    expected = 'expected "ramp", "greedy", "auto", a BucketPlan, or the path of a file that plan.save() wrote'
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"plan must be a rule or a plan, got {value!r} of type {type(value).__name__}; {expected}")
    try:
        return load_plan(value)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"plan is {os.fspath(value)!r}, which cannot be read: {reason}; {expected}") from None


def fitted(plan: BucketPlan, specs: Sequence[ParamSpec]) -> BucketPlan:
    """Return the same buckets for the parameters of a model, on their device.

    Raises:
        ValueError: the plan is of another model; names the first parameter that differs.
    """
    ours, theirs = ([(spec.name, spec.shape, spec.dtype, spec.sparse) for spec in each] for each in (specs, plan.specs))
    if ours != theirs:
        number = next(
            (number for number, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        raise ValueError(
            f"plan is of another model: trainable parameter {number} is {_text(theirs, number)} in the plan, and "
            f"{_text(ours, number)} in the module (the plan has {len(theirs)}, the module {len(ours)}); expected "
            "equal names, shapes and dtypes in the same order. Make a plan of this model, or leave plan out."
        )
    return plan_from_groups(specs, [bucket.params for bucket in plan.buckets])


def plan_digest(plan: BucketPlan) -> str:
    """Return a short text that is equal for two plans if and only if their layouts are."""
    return f"{len(plan.buckets)} buckets, sha256 {hashlib.sha256(plan.layout.encode()).hexdigest()[:16]}"


def _text(rows: list[Any], number: int) -> str:
    if number >= len(rows):
        return "missing"
    name, shape, dtype, sparse = rows[number]
    return f"{name!r} of shape {shape} and dtype {dtype}{', sparse' if sparse else ''}"
