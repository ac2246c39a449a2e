"""The files of a model: PATH.pdparams, .pdopt, .pdscaler for training, PATH.pt2 for inference."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfuse import DPFuseError
from dpfuse.arguments import a_path, flag
from dpfuse.model.state_dict import without_prefix
from dpfuse.model.trial_load import compared
from dpfuse.paddle.paddle_files import in_torch_layout
from dpfuse.paddle.serialization import is_paddle_file, load, save, written_whole
from dpfuse.paddle.static.input_spec import InputSpec
from dpfuse.paddle.stepper import Stepper

__all__ = ["export", "prefix_of", "restore", "store"]

SUFFIXES = (".pdparams", ".pdopt", ".pdscaler", ".pt2")
EPOCHS = "trained_epochs"  # in the optimizer's file, beside its state
SCHEDULES = "LR_Scheduler"  # there, too, under Paddle's name
ANY_SIZE = 32  # in the example inputs of an export: size of a free dimension other than the batch


def prefix_of(path: Any) -> str:
    """Return `path` without the suffix of one of the files.

    Raises:
        TypeError, ValueError: `path` is no path, or names no file.
    """
    a_path("path", path, "checkpoint/model")
    text = os.fspath(path)
    assert isinstance(text, str)
    for suffix in SUFFIXES:
        text = text.removesuffix(suffix)
    if not os.path.basename(text):
        raise ValueError(f"path: got {os.fspath(path)!r}, expected folder/name, the begin of the files' names")
    return text


def store(stepper: Stepper, prefix: str) -> None:
    """Write the files from which training can continue."""
    save(stepper.network.state_dict(), f"{prefix}.pdparams")
    if stepper.optimizer is not None:
        more = {EPOCHS: stepper.epochs, SCHEDULES: stepper.schedules.state()}
        save({**stepper.optimizer.state_dict(), **more}, f"{prefix}.pdopt")
    if stepper.precision.scaler is not None:
        save(stepper.precision.scaler.state_dict(), f"{prefix}.pdscaler")


def restore(stepper: Stepper, prefix: str, skip_mismatch: bool, reset_optimizer: bool) -> None:
    """Read the files of `store`, or those of real Paddle, on this rank. Ignore parameters that the network lacks.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A parameter is missing or has another shape, and `skip_mismatch` is False; or the optimizer's state
            does not fit or is broken. Then nothing is loaded.
    """
    flag("skip_mismatch", skip_mismatch)
    flag("reset_optimizer", reset_optimizer)
    saved = load(f"{prefix}.pdparams")
    expected = stepper.network.state_dict()
    if not isinstance(saved, Mapping):
        raise ValueError(f"{prefix}.pdparams holds a {type(saved).__name__}; expected a dict of parameters by name")
    saved = without_prefix(saved, stepper.network)
    if is_paddle_file(f"{prefix}.pdparams"):
        saved = dict(in_torch_layout(saved, stepper.network))
    missing = compared(stepper.network, saved).missing
    problems = {key: problem for key, value in expected.items() if (problem := _mismatch(key, value, saved, missing))}
    if problems and not skip_mismatch:
        raise ValueError(
            f"{prefix}.pdparams does not fit the network: {'; '.join(problems.values())}. Pass skip_mismatch=True to "
            "load the rest."
        )
    if problems:
        warnings.warn(f"not loaded: {'; '.join(problems.values())}", UserWarning, stacklevel=3)
        reset_optimizer = True
    epochs = 0
    schedules: list[Any] = []
    if stepper.optimizer is not None and not reset_optimizer:
        epochs, schedules = _restore_optimizer(stepper, stepper.optimizer, prefix)
    elif stepper.optimizer is not None:
        stepper.optimizer.state.clear()
    elif not reset_optimizer and Path(f"{prefix}.pdopt").is_file():
        warnings.warn(
            f"{prefix}.pdopt is not loaded, because there is no optimizer yet; call prepare before load to continue "
            "training, or pass reset_optimizer=True",
            UserWarning,
            stacklevel=3,
        )
    stepper.epochs = epochs
    stepper.schedules.load(schedules)
    fitting = {key: value for key, value in saved.items() if key not in problems}
    stepper.network.load_state_dict(fitting, strict=False)


def _mismatch(key: str, value: Any, saved: Mapping[str, Any], missing: Sequence[str]) -> str | None:
    if key not in saved:
        return f"{key!r} is not in the file" if key in missing else None
    got = saved[key]
    if isinstance(value, Tensor) and (not isinstance(got, Tensor) or got.shape != value.shape):
        shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        return f"{key!r} has shape {shape} in the file, expected {tuple(value.shape)}"
    return None


def _restore_optimizer(stepper: Stepper, optimizer: torch.optim.Optimizer, prefix: str) -> tuple[int, list[Any]]:
    """Load the states of optimizer and loss scale, both or none. Return the number of trained epochs, and schedules."""
    remedy = "The model has an optimizer; pass reset_optimizer=True to load only the parameters."
    scaler = stepper.precision.scaler
    before = optimizer.state_dict(), None if scaler is None else scaler.state_dict()
    try:
        state = dict(load(f"{prefix}.pdopt"))
        epochs, schedules = int(state.pop(EPOCHS, 0)), list(state.pop(SCHEDULES, []))
        scale = load(f"{prefix}.pdscaler") if scaler is not None and Path(f"{prefix}.pdscaler").is_file() else None
        optimizer.load_state_dict(state)
        # The state of another optimizer loads without an error, but the first step would raise.
        missing = [key for group in optimizer.param_groups for key in optimizer.defaults if key not in group]
        if missing:
            raise ValueError(f"{missing[0]!r} is missing")
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. {remedy}") from None
    except Exception as error:
        optimizer.load_state_dict(before[0])
        if scaler is not None and before[1] is not None:
            scaler.load_state_dict(before[1])
        raise ValueError(
            f"{prefix}.pdopt does not fit the optimizer, {type(optimizer).__name__} ({type(error).__name__}: {error}); "
            f"nothing is loaded. {remedy}"
        ) from error
    return epochs, schedules


def export(network: nn.Module, inputs: Sequence[Any], device: torch.device, prefix: str) -> None:
    """Write the forward with torch.export, for inference without the network's source.

    The first dimension of every input is the batch. It may have any size if its spec says so, equal for all inputs.

    Raises:
        DPFuseError: There are no specs of the inputs.
    """
    specs = [spec for spec in inputs if isinstance(spec, InputSpec)]
    if not specs or len(specs) != len(inputs):
        raise DPFuseError(
            "saving for inference needs the shapes of the network's inputs; build the model with "
            "Model(network, inputs=[InputSpec([None, …], 'float32', 'x')])"
        )
    batch = torch.export.Dim("batch")
    examples, sizes = [], []
    for spec in specs:
        shape = [size if size >= 0 else ANY_SIZE if i else 2 for i, size in enumerate(spec.shape)]
        examples.append(torch.zeros(shape, dtype=spec.dtype, device=device))
        sizes.append({i: torch.export.Dim.AUTO if i else batch for i, size in enumerate(spec.shape) if size < 0})
    program = torch.export.export(network, tuple(examples), dynamic_shapes=tuple(sizes))
    with written_whole(f"{prefix}.pt2") as temporary:
        torch.export.save(program, temporary)
