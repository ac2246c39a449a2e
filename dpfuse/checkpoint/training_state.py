"""The parts of a training in a checkpoint: the state of each, and whether a saved state fits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from dpfuse.engine.local_part import is_divided
from dpfuse.model.trial_load import compared

__all__ = ["Stateful", "check_arguments", "check_fit", "refuse_divided", "sampler_state", "set_sampler_state"]


class Stateful(Protocol):
    """An optimizer, a learning rate scheduler, a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def check_arguments(what: str, place: tuple[str, Any], model: Any, parts: Mapping[str, Any], method: str) -> None:
    """Raise TypeError for an argument of another kind, such as one in the order of `torch.save`.

    Args:
        what: the public function.
        place: the name of its first argument, and what was passed.
        model: what was passed as the model.
        parts: what was passed as parts with a state, by the names of the arguments; None where one was left out.
        method: that the function calls of each part.
    """
    name, path = place
    order = f"Pass them in this order: {what}({name}, model, optimizer)."
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {_kind_of(path)}. {order}")
    if not isinstance(model, nn.Module):
        remedy = "Pass the module itself, and not its state_dict()." if isinstance(model, Mapping) else order
        raise TypeError(f"model must be a torch.nn.Module, got {_kind_of(model)}. {remedy}")
    for name, part in parts.items():
        if part is not None and (isinstance(part, type) or not callable(getattr(part, method, None))):
            remedy = f"Pass the {name} itself, and not its state_dict()." if isinstance(part, Mapping) else order
            raise TypeError(f"{name} must be an object with {method}(), got {_kind_of(part)}. {remedy}")


def _kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def refuse_divided(model: nn.Module, what: str) -> None:
    """Raise TypeError where a parameter or buffer is a DTensor, of which one file of one rank has only a part."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_divided(tensor):
            raise TypeError(
                f"{what} was called with a model whose {name!r} is a DTensor, expected plain tensors: rank 0 has only "
                "a part of it, and writes one file. Use torch.distributed.checkpoint."
            )


def sampler_state(sampler: Any) -> dict[str, Any] | None:
    """Return the state of a sampler, or its epoch; None for no sampler.

    Raises:
        TypeError: it has neither.
    """
    if sampler is None:
        return None
    if callable(getattr(sampler, "state_dict", None)):
        return {"state": sampler.state_dict(), "of_all_ranks": getattr(sampler, "same_on_all_ranks", False) is True}
    epoch = getattr(sampler, "epoch", None)
    if not isinstance(epoch, int):
        raise TypeError(
            f"sampler: got a {type(sampler).__name__}, which has neither state_dict() nor an epoch; expected for "
            "instance a DistributedSampler (of a DataLoader: loader.sampler). Leave it out if it has no state."
        )
    return {"epoch": epoch}


def set_sampler_state(sampler: Any, saved: Mapping[str, Any]) -> None:
    """Restore what `sampler_state` returned."""
    if "state" in saved:
        sampler.load_state_dict(saved["state"])
    elif hasattr(sampler, "set_epoch"):
        sampler.set_epoch(saved["epoch"])
    else:
        sampler.epoch = saved["epoch"]


def optimizer_class(optimizer: Stateful) -> str:
    """Return the name of the class whose state an optimizer has. A sharded optimizer has that of the class inside."""
    kind: type = getattr(optimizer, "optimizer_class", type(optimizer))
    return kind.__name__


def check_fit(content: Mapping[str, Any], model: nn.Module, asked: Mapping[str, Stateful]) -> None:
    """Check that a checkpoint fits the bare model and the parts that are asked for, before anything is loaded.

    Raises:
        ValueError: it does not fit, or has no such part.
    """
    saved, expected = content["model"], model.state_dict()
    found = compared(model, saved)
    problems = [f"{name!r} is missing in the file" for name in found.missing]
    problems += [f"{name!r} is not in the model" for name in found.unexpected]
    problems += found.errors
    for name, value in expected.items():
        if isinstance(value, Tensor) and name in saved and value.shape != saved[name].shape:
            shapes = f"{tuple(saved[name].shape)} in the file, expected {tuple(value.shape)}"
            problems.append(f"{name!r} has shape {shapes}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the checkpoint does not fit the model: {'; '.join(problems[:5])}{more}. Nothing was loaded.")
    for name in asked:
        if name not in content:
            raise ValueError(f"{name}: the checkpoint was saved without one; save it as well, or leave it out here")
    optimizer = asked.get("optimizer")
    if optimizer is None:
        return
    if content["optimizer_type"] != optimizer_class(optimizer):
        raise ValueError(
            f"optimizer: the checkpoint has the state of {content['optimizer_type']}, got "
            f"{optimizer_class(optimizer)}. Nothing was loaded."
        )
    own = getattr(optimizer, "param_groups", None) or optimizer.state_dict()["param_groups"]
    saved_groups, own_groups = (
        [len(group["params"]) for group in groups] for groups in (content["optimizer"]["param_groups"], own)
    )
    if saved_groups != own_groups:
        raise ValueError(
            f"optimizer: the checkpoint has groups of {saved_groups} parameters, expected {own_groups}. "
            "Nothing was loaded."
        )
