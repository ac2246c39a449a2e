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
from dpfuse.paddle.engine import Engine
from dpfuse.paddle.serialization import load, save, written_whole
from dpfuse.paddle.static.input_spec import InputSpec

__all__ = ["export", "prefix_of", "restore", "store"]

SUFFIXES = (".pdparams", ".pdopt", ".pdscaler", ".pt2")
ANY_SIZE = 32  # of a dimension of any size but the batch's, in the example that an export is traced with


def prefix_of(path: Any) -> str:
    """`path` without the ending of one of the files.

    Raises:
        TypeError, ValueError: no path, or one that names no file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a path such as 'checkpoint/model', got {path!r}")
    text = os.fspath(path)
    assert isinstance(text, str)
    for suffix in SUFFIXES:
        text = text.removesuffix(suffix)
    if not os.path.basename(text):
        raise ValueError(f"path: got {os.fspath(path)!r}, expected folder/name, where name begins the files' names")
    return text


def store(engine: Engine, prefix: str) -> None:
    """Write what training needs to go on."""
    save(engine.network.state_dict(), f"{prefix}.pdparams")
    if engine.optimizer is not None:
        save(engine.optimizer.state_dict(), f"{prefix}.pdopt")
    if engine.precision.scaler is not None:
        save(engine.precision.scaler.state_dict(), f"{prefix}.pdscaler")


def restore(engine: Engine, prefix: str, skip_mismatch: bool, reset_optimizer: bool) -> None:
    """Read it back, on this rank; parameters that the file has beyond the network's are ignored.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a parameter is missing or has another shape, and `skip_mismatch` is False; nothing is loaded.
    """
    saved = load(f"{prefix}.pdparams")
    expected = engine.network.state_dict()
    if not isinstance(saved, Mapping):
        raise ValueError(f"{prefix}.pdparams holds a {type(saved).__name__}; expected a dict of parameters by name")
    if not any(key in saved for key in expected):
        saved = {key.removeprefix("module."): value for key, value in saved.items()}
    problems = {key: problem for key, value in expected.items() if (problem := _mismatch(key, value, saved))}
    if problems and not skip_mismatch:
        raise ValueError(
            f"{prefix}.pdparams does not fit the network: {'; '.join(problems.values())}. Pass skip_mismatch=True to "
            "load the rest."
        )
    if problems:
        warnings.warn(f"not loaded: {'; '.join(problems.values())}", UserWarning, stacklevel=3)
        reset_optimizer = True
    optimizer, scaler = engine.optimizer, engine.precision.scaler
    # Read before anything is changed: a missing file must not leave half of the old state.
    state = None if optimizer is None or reset_optimizer else _optimizer_state(prefix)
    engine.network.load_state_dict({key: saved[key] for key in expected if key not in problems}, strict=False)
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state)
    elif optimizer is not None:
        optimizer.state.clear()
    if scaler is not None and state is not None and Path(f"{prefix}.pdscaler").is_file():
        scaler.load_state_dict(load(f"{prefix}.pdscaler"))


def _mismatch(key: str, value: Any, saved: Mapping[str, Any]) -> str | None:
    if key not in saved:
        return f"{key!r} is not in the file"
    got = saved[key]
    if isinstance(value, Tensor) and (not isinstance(got, Tensor) or got.shape != value.shape):
        shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        return f"{key!r} has shape {shape} in the file, expected {tuple(value.shape)}"
    return None


def _optimizer_state(prefix: str) -> Any:
    try:
        return load(f"{prefix}.pdopt")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}. The model has an optimizer; pass reset_optimizer=True to load the parameters alone."
        ) from None


def export(network: nn.Module, inputs: Sequence[Any], device: torch.device, prefix: str) -> None:
    """Write the forward, by torch.export, for inference without the network's source.

    The first dimension of every input may be of any size if its spec says so; it is the batch, the same for all.

    Raises:
        DPFuseError: there are no specs of the inputs.
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
