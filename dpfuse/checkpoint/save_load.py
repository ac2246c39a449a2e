"""Save and resume a training: model, optimizer and everything else that the next step depends on, in one file.

Rank 0 reads and writes the file. The other ranks send it the state that differs between ranks, and receive the bytes
that it has read. Data from a peer is only loaded with `weights_only=True`.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from dpfuse.arguments import integer
from dpfuse.checkpoint.bucket_plan import saved_plan, use_saved_plan
from dpfuse.checkpoint.folder import read_newest, read_whole, step_path, write_step
from dpfuse.checkpoint.micro_batches import check_micro_batches, saved_micro_batches, use_micro_batches
from dpfuse.checkpoint.training_state import (
    Stateful,
    check_arguments,
    check_fit,
    optimizer_class,
    refuse_divided,
    sampler_state,
    set_sampler_state,
)
from dpfuse.comm import collective, votes
from dpfuse.comm.waiting import Doing, telling
from dpfuse.engine.random_states import get_random_state, seed_from, set_random_state
from dpfuse.engine.torch_private import uncompiled
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError, WeightsWarning
from dpfuse.model.module_sync import ModuleSync
from dpfuse.model.state_dict import without_prefix
from dpfuse.rules.codes import WEIGHTS
from dpfuse.rules.w01_weights_differ import text_of_checkpoint
from dpfuse.stopping.deadline import deadline
from dpfuse.wrapper import SyncedModule, bare_module, wrapper_of, wrappers_in

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]

SUFFIX = ".pt"
PIECE = 64 << 20  # bytes of a file that are sent at a time
ADVICE = "Call it on every rank, at the same step and with the same arguments."

Result = TypeVar("Result")


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` found."""

    step: int  # the number that was saved; 0 if there was nothing to load
    path: Path | None  # of the file, as this rank named its folder; None if there was nothing to load
    extra: Any = None  # the value that was saved as `extra`


@deadline.saving()
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Stateful | None = None,
    *,
    step: int,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    sampler: Any = None,
    extra: Any = None,
    keep: int | None = 3,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a training between two steps, in `folder/step-<step>.pt`; every rank calls it.

    Rank 0 writes the file under another name, flushes it to the disk and renames it, so that a kill at any moment loses
    no checkpoint. The other ranks wait for it. The file holds the states that the arguments name, the buckets, and the
    random states of every rank (torch, the current GPU, `random`, NumPy). `torch.load(path, weights_only=True)` can
    read it.

    Args:
        folder: made if it does not exist, under any name; only rank 0 uses it.
        model: wrapped by dpfuse or by torch, replicated, or not wrapped; or parts of it are. The names in the file are
            those of the bare module.
        optimizer: rank 0 saves its state.
        step: the number of steps done; not below that of any file in the folder.
        scheduler: of the learning rate, or anything with `state_dict()`.
        scaler: a GradScaler, or anything with `state_dict()`.
        sampler: an object with `state_dict()`, saved for each rank, or with an `epoch`, such as a DistributedSampler.
            The state of one with `same_on_all_ranks = True`, such as a `ResumableBatchSampler`, is rank 0's.
        extra: any other values of rank 0: tensors, numbers, texts, and lists and dicts of them.
        keep: the number of files to keep, the newest ones; None keeps all.
        group: of the ranks that train this model; None means the group of the wrapper, else the whole job.

    Returns:
        The path of the file.

    Raises:
        ValueError, TypeError: an argument is wrong; an entry cannot be loaded with `weights_only=True`; the folder
            has a later step, or is a file; a parameter or buffer is a DTensor.
        DPFuseError: saving failed on another rank, or the disk reported an error. The text is the same on every rank.
            Earlier checkpoints are not changed. Or the weights of the ranks differ, which one has suspected (DPF-L01).

    Example:
        >>> import dpfuse, tempfile, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dpfuse.save_checkpoint(folder, model, optimizer, step=10).name
        ...     dpfuse.load_checkpoint(folder, model, optimizer).step
        'step-0000000010.pt'
        10
    """
    what = "save_checkpoint"
    stateful = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    group = _group_of(model, group)
    wrappers = _wrappers_of(model)
    syncs = _syncs_of(wrappers)
    for sync in syncs:
        sync.complete_failed()
        if sync.weights is not None and group is sync.grads.group:
            with telling(group, Doing.SAVE):
                sync.weights.settle()  # before weights are saved that a rank suspects
        if known := sync.differing_weights:
            warn_at_user(WeightsWarning(text_of_checkpoint(sync.grads.group.rank(), known), WEIGHTS))
    if any(sync.open_window.holds_gradients() for sync in syncs):
        warn_at_user(
            "save_checkpoint() was called while a window of no_sync() is open: gradients have accumulated that no step "
            "has used, and a checkpoint holds none, so a training that goes on from it lacks them. Save after "
            "optimizer.step(); to drop these gradients, call optimizer.zero_grad() before you save."
        )

    def own_part() -> tuple[int, bytes]:
        check_arguments(what, ("folder", folder), model, stateful, "state_dict")
        refuse_divided(model, what)
        number = integer("step", step, 0)
        if keep is not None:
            integer("keep", keep, 1)
        buffer = io.BytesIO()
        torch.save({"random": get_random_state(), "sampler": sampler_state(sampler)}, buffer)
        return number, buffer.getvalue()

    number, own = _together(own_part, group, what, lambda part: f"step={part[0]} keep={keep}")
    parts = _gather(own, group)
    # On every rank: that of a sharded optimizer gathers the parts of all.
    state = None if optimizer is None else _together(optimizer.state_dict, group, what)

    def write() -> Path:
        place = Path(folder).expanduser()
        if group is not None and group.rank() != 0:
            return step_path(place, number)
        content: dict[str, Any] = {"step": number, "model": bare_module(model).state_dict()}
        for name, value in (("scheduler", scheduler), ("scaler", scaler)):
            if value is not None:
                content[name] = value.state_dict()
        if optimizer is not None:
            content |= {"optimizer": state, "optimizer_type": optimizer_class(optimizer)}
        if extra is not None:
            content["extra"] = extra
        saved = {name: _saved_of(wrapper) for name, wrapper in wrappers.items()}
        content |= saved.pop("", {})
        if saved:
            content["parts"] = saved
        return write_step(place, number, {**content, "ranks": parts}, keep)

    return _together(write, group, what)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Stateful | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    sampler: Any = None,
    random_state: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> Checkpoint:
    """Load the newest checkpoint of a folder, or one file; every rank calls it.

    Rank 0 reads the file and sends it to the others, so all ranks load the same content, or none loads anything. A file
    that is cut short or has flipped bits causes a warning and is renamed to `….damaged`; the file before it is loaded.
    As many ranks with the same options go on with the buckets of the file, and so with the same bits.

    Args:
        path: the folder that was given to `save_checkpoint`, or a file in it. If the folder does not exist or has no
            checkpoint, nothing is loaded, and the returned step is 0.
        model: as in `save_checkpoint`; its parameters stay the same objects. Loading resets its error-feedback
            residuals.
        optimizer: over the parameters of `model`; None does not load this part, and so for the next three.
        scheduler: of the learning rate.
        scaler: a GradScaler.
        sampler: an object with `load_state_dict()`, or with an `epoch`.
        random_state: whether to restore each rank's random states; None restores them if there is an optimizer. On
            another number of ranks they follow from the file and the rank: the same in each such job.
        group: as in `save_checkpoint`.

    Returns:
        The step, the path and the value that was saved as `extra`.

    Raises:
        FileNotFoundError: `path` ends in `.pt`, and there is no such file, and no such folder.
        ValueError, TypeError: the file does not fit the model, the optimizer or the sampler, or a parameter or buffer
            is a DTensor; nothing was loaded.
        DPFuseError: loading failed on another rank, or every checkpoint is damaged. The text is the same on every rank.

    Example:
        >>> import dpfuse, torch
        >>> dpfuse.load_checkpoint("no_such_folder", torch.nn.Linear(4, 2))
        Checkpoint(step=0, path=None, extra=None)
    """
    what = "load_checkpoint"
    group = _group_of(model, group)
    wrappers = _wrappers_of(model)
    for sync in _syncs_of(wrappers):
        sync.complete_failed()
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    asked = {name: value for name, value in parts.items() if value is not None}
    with_random = optimizer is not None if random_state is None else random_state

    def find() -> tuple[Path, tuple[Path, dict[str, Any]] | None]:
        check_arguments(what, ("path", path), model, parts, "load_state_dict")
        sampler_state(sampler)
        if random_state is not None and not isinstance(random_state, bool):
            raise TypeError(f"random_state must be True, False or None, got {random_state!r}")
        refuse_divided(model, what)
        place = Path(path).expanduser()
        if group is not None and group.rank() != 0:
            return place, None
        if place.suffix == SUFFIX and not place.is_dir():
            if not place.exists():
                raise FileNotFoundError(
                    f"path: got {place}, which does not exist, expected a file or a folder of checkpoints. Where "
                    f"save_checkpoint is to make this folder later, choose a name that does not end in {SUFFIX}."
                )
            return place, (place, read_whole(place))
        if place.is_file():
            raise ValueError(f"path: got the file {place}, expected a folder, or a file whose name ends in {SUFFIX}")
        return place, read_newest(place)

    place, found = _together(find, group, what, lambda _: f"loads {sorted(asked)}, random_state={with_random}")
    chosen = None if found is None else found[0]
    in_folder = chosen is not None and chosen != place
    data, in_folder = (None, in_folder) if group is None else _send(chosen, in_folder, group)
    if found is None and data is None:
        return Checkpoint(0, None)

    def read() -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        if data is not None:
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        else:
            assert found is not None
            content = found[1]
        content["model"] = without_prefix(content["model"], bare_module(model))
        check_fit(content, bare_module(model), asked)
        saved = _saved_by_wrapper(content)
        fixed = [
            name
            for name, wrapper in wrappers.items()
            if check_micro_batches(wrapper, saved.get(name, {}).get("micro_batches"))
        ]
        same_states = bool(fixed) and len(fixed) == len(wrappers)
        return content, _own_part(content["ranks"], group, sampler, with_random, same_states=same_states), fixed

    content, own, fixed = _together(read, group, what)
    saved = _saved_by_wrapper(content)

    def apply() -> Checkpoint:
        bare_module(model).load_state_dict(content["model"])
        for name, value in asked.items():
            value.load_state_dict(content[name])
        if sampler is not None:
            set_sampler_state(sampler, own["sampler"])
        if with_random and "random" in own:
            set_random_state(own["random"])
        elif with_random:
            seed_from(own["of_first"], 0 if group is None else group.rank())
        for sync in _syncs_of(wrappers):
            sync.grads.lost.weights_replaced()
        for wrapper in wrappers.values():
            if wrapper.error_feedback is not None:
                wrapper.error_feedback.reset()
        for name in fixed:
            use_micro_batches(wrappers[name], saved[name]["micro_batches"])
        where = step_path(place, content["step"]) if in_folder else place
        return Checkpoint(content["step"], where, content.get("extra"))

    loaded = _together(apply, group, what)
    if group is not None and group.size() == len(content["ranks"]):
        for name, of_wrapper in saved.items():
            if "plan" in of_wrapper:
                use_saved_plan(wrappers.get(name), of_wrapper["plan"], group)
    return loaded


def _wrappers_of(model: nn.Module) -> dict[str, SyncedModule]:
    """The wrappers of a model; none of what is no module, which `check_arguments` refuses on every rank."""
    return wrappers_in(model) if isinstance(model, nn.Module) else {}


def _syncs_of(wrappers: Mapping[str, SyncedModule]) -> list[ModuleSync]:
    return [wrapper._sync for wrapper in wrappers.values() if wrapper._sync is not None]


def _saved_of(wrapper: SyncedModule) -> dict[str, Any]:
    """What a file has of a wrapper."""
    saved = {"plan": saved_plan(wrapper), "micro_batches": saved_micro_batches(wrapper)}
    return {name: value for name, value in saved.items() if value is not None}


def _saved_by_wrapper(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a file has of each wrapper, by the name of what it wraps; that of the whole model is not set apart."""
    return {"": content, **content.get("parts", {})}


def _together(
    work: Callable[[], Result],
    group: dist.ProcessGroup | None,
    what: str,
    describe: Callable[[Result], str] = lambda _: "",
) -> Result:
    """Return what `work` returns on this rank.

    Args:
        work: called on every rank.
        group: of the ranks; None for one rank.
        what: the public function, for error texts.
        describe: turns a result into a text that must be equal on all ranks.

    Raises:
        DPFuseError: `work` failed on some rank, or the texts differ; raised on every rank.
        ValueError, TypeError, FileNotFoundError: `work` raised it on this rank.
    """
    error: Exception | None = None
    try:
        result = work()
        text = describe(result)
    except Exception as caught:
        error, text = caught, f"{votes.FAILURE}{caught}"
    try:
        if group is not None:
            with telling(group, Doing.SAVE if what == "save_checkpoint" else Doing.LOAD):
                votes.agree_on_text(text, group, what, ADVICE)
        elif error is not None:
            raise DPFuseError(f"{what} failed: {error}")
    except DPFuseError as told:
        if isinstance(error, (ValueError, TypeError, FileNotFoundError)):
            raise error from None
        raise told from error
    return result


def _group_of(model: nn.Module, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    wrapper, inner = wrapper_of(model), uncompiled(model)
    if group is None and wrapper is not None:
        return wrapper._group
    if group is None and isinstance(inner, TorchDistributedDataParallel):
        group = inner.process_group
    found = collective.resolve_group(group)
    if found is not None and isinstance(model, nn.Module):
        collective.use_device_of((param for _, param in model.named_parameters()), found)
    return found


def _gather(own: bytes, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the bytes of every rank, by rank; only the rank itself decodes them."""
    row = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    if group is None:
        return [row]
    device = collective.group_device(group)
    sizes = [int(size) for size in collective.all_gather(torch.tensor(len(own), device=device), group)]
    largest = max(sizes)
    if largest > votes.MAX_TEXT:
        raise DPFuseError(
            f"the sampler of rank {sizes.index(largest)} has a state of {largest} bytes; expected at most "
            f"{votes.MAX_TEXT}. Leave it out, and save what it needs as extra."
        )
    padded = torch.zeros(largest, dtype=torch.uint8, device=device)
    padded[: len(own)] = row
    rows = collective.all_gather(padded, group)
    return [row[:size].cpu().clone() for row, size in zip(rows, sizes, strict=True)]


def _send(path: Path | None, in_folder: bool, group: dist.ProcessGroup) -> tuple[bytearray | None, bool]:
    """Send the file of rank 0.

    Args:
        path: of the file, on rank 0; None if it has none.
        in_folder: whether rank 0 has found it in the folder that was named.
        group: of the ranks.

    Returns:
        Its bytes on the other ranks, or None if rank 0 has no file; `in_folder` of rank 0.
    """
    device = collective.group_device(group)
    facts = torch.zeros(2, dtype=torch.int64, device=device)
    if group.rank() == 0:
        facts = torch.tensor([-1 if path is None else path.stat().st_size, in_folder], device=device)
    collective.broadcast(facts, group)
    size, in_folder = int(facts[0]), bool(facts[1])
    if group.rank() == 0:
        if path is not None:
            with open(path, "rb") as file:
                while piece := file.read(PIECE):
                    collective.broadcast(torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(device), group)
        return None, in_folder
    if size < 0:
        return None, in_folder
    data = bytearray(size)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    for part in whole.split(PIECE):
        wire = torch.empty_like(part, device=device)
        collective.broadcast(wire, group)
        part.copy_(wire)
    return data, in_folder


def _read_part(part: Tensor) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True)
    return content


def _own_part(
    parts: list[Tensor], group: dist.ProcessGroup | None, sampler: Any, with_random: bool, *, same_states: bool
) -> dict[str, Any]:
    """Return the part that this rank saved; if the number of ranks has changed, only what is common to all ranks.

    Args:
        parts: of the ranks that saved.
        sampler: whose state is asked for, if any.
        same_states: whether all ranks have saved the same random states.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    same = len(parts) == size
    of_first, own = (_read_part(parts[other if same else 0]) for other in (0, rank))
    if sampler is not None and own["sampler"] is None:
        raise ValueError("sampler: the checkpoint was saved without one; save it as well, or leave it out here")
    of_all = own["sampler"] is not None and own["sampler"].get("of_all_ranks", False)
    if of_all:
        own["sampler"] = of_first["sampler"]  # a rank without a batch in the last step is in the next epoch already
    if same:
        return own
    if with_random and not same_states:
        warnings.warn(
            f"the checkpoint is of {len(parts)} rank(s), this job has {size}: each rank gets random states that follow "
            "from the checkpoint and its own number, and not those that were saved. Pass random_state=False to keep "
            "the present ones.",
            UserWarning,
            stacklevel=4,
        )
    if sampler is not None and "state" in own["sampler"] and not of_all:
        raise ValueError(
            f"sampler: the checkpoint has the states of {len(parts)} rank(s), this job has {size}; leave it out here"
        )
    return {"sampler": own["sampler"], "random" if same_states else "of_first": of_first["random"]}
