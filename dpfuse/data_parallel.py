"""DataParallel, the wrapper with Paddle's arguments, and state dicts as of the bare module."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from dpfuse.arguments import flag, instance
from dpfuse.comm.collective import resolve_group
from dpfuse.engine.user_line import warn_at_user
from dpfuse.errors import DPFuseError
from dpfuse.model.options import CommonOptions, SyncOptions, filled, takes_common_options
from dpfuse.model.state_dict import (
    PREFIX,
    accept_unprefixed,
    check_mapping,
    load_leniently,
    naming_keys,
    own_names,
    without_prefix,
)
from dpfuse.wrapper import SyncedModule

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DataParallel"]


@takes_common_options
class DataParallel(SyncedModule):
    """Averages gradients over the ranks while backward runs; a drop-in wrapper around any module.

    When `backward()` returns, every `.grad` is the mean over the ranks, final on the current stream:
    clipping, `GradScaler` and `optimizer.step()` follow as usual. Parameters that some ranks do not use get
    the mean with zeros from those ranks; parameters without gradient on every rank stay without.

    Args:
        layers: the module to train; the same on every rank, on one device. Rank 0's parameters and buffers
            overwrite those of the others.
        strategy: Paddle's deprecated argument, accepted for its position and ignored with a warning.
        comm_buffer_size: a bucket is sent once its gradients reach this many MB (1048576 bytes; fractions
            are fine). 0 sends every gradient alone, `inf` one bucket per dtype. None begins with 25; the buckets
            that are made after the first backward may be larger by a tenth of the model, on GPUs and between
            machines.
        last_comm_buffer_size: the same, in MB, for the bucket that is sent when backward ends.
        find_unused_parameters: True leaves out the warning that names parameters without gradient. A
            bucket then waits only for those that the graph of the backward reaches.
        group: process group; None is the default group. Without any process group the wrapper only
            passes calls through, and says so once.
        gradient_as_bucket_view: True makes `.grad` a view of the communication buffer, which saves a copy;
            the next synchronised backward overwrites a view that was kept. False keeps gradients private.
        broadcast_buffers: True sends the module's buffers (running statistics) from rank 0 to all ranks in every
            backward that synchronises, and before a forward that no such backward preceded. False sends them at
            construction only.
        gradient_scale: factor on each rank's gradients before the sum; None is 1 / number of ranks, the
            mean; 1.0 gives the plain sum.

    Raises:
        TypeError, ValueError: an argument, or a parameter, that cannot be used; the text names it.
        DPFuseError: the ranks' models or options differ, or construction failed on another rank (raised
            on every rank); `WORLD_SIZE` announces several ranks and there is no process group.

    Example:
        >>> import dpfuse, torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.weight.grad.shape
        torch.Size([2, 4])
        >>> dist.destroy_process_group()

    Source: the arguments and the bucket rule are those of `paddle.DataParallel`; the semantics follow
    torch's `DistributedDataParallel` where it is right.
    """

    def __init__(
        self,
        layers: nn.Module,
        strategy: Any = None,
        comm_buffer_size: float | None = None,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: dist.ProcessGroup | None = None,
        *,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = False,
        gradient_scale: float | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        common = filled(options, DataParallel)
        super().__init__()
        if strategy is not None:
            text = f"strategy is deprecated and ignored, got {strategy!r}; leave it out, as torch's device_ids"
            warn_at_user(DeprecationWarning(text))
        self.module = layers
        self._options = SyncOptions(
            comm_buffer_size,
            last_comm_buffer_size,
            find_unused_parameters,
            gradient_as_bucket_view,
            broadcast_buffers,
            common,
            gradient_scale,
        )
        nn.Module.register_load_state_dict_pre_hook(self, accept_unprefixed)
        self._connect(resolve_group(group), fresh=True)
        if self._options.autotune and self._sync is not None:
            from dpfuse.tune import autotune  # it takes time to import

            autotune(self)

    def _connect(self, group: dist.ProcessGroup | None, *, fresh: bool) -> None:
        super()._connect(group, fresh=fresh)
        if group is None:
            _check_single_process()

    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        include_sublayers: bool = True,
        *,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The wrapped module's state dict, without any prefix of the wrapper: the two are interchangeable.

        Args:
            destination: a dict to fill; a new one by default.
            include_sublayers: False leaves out what belongs to the module's children.
            prefix: put before each name.
            keep_vars: True gives the parameters themselves instead of detached tensors.

        Returns:
            `destination`.

        Raises:
            TypeError: an argument has another type.

        Source: `paddle.DataParallel.state_dict`.
        """
        instance("destination", destination, (MutableMapping, NoneType), "a dict to fill, or None")
        instance("prefix", prefix, str, "a text", "pass for example 'net.'")
        if not flag("include_sublayers", include_sublayers):
            destination = OrderedDict() if destination is None else destination
            self.module._save_to_state_dict(destination, prefix, keep_vars)
            return destination
        if destination is None:
            state: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        else:
            state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        versions = getattr(state, "_metadata", None)
        if versions is not None and prefix:
            # A parent that loads finds the wrapped module one level below the wrapper.
            inner = {key: value for key, value in versions.items() if f"{key}.".startswith(prefix)}
            versions.update({f"{prefix}{PREFIX}{f'{key}.'.removeprefix(prefix)}"[:-1]: v for key, v in inner.items()})
        return state

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load what matches by name, and warn of the rest. Only this rank is changed, so call it on every rank.

        Args:
            state_dict: names with or without `module.`; tensors or numpy arrays.
            use_structured_name: False expects `param_<i>` and `buffer_<i>`, by registration index, as keys.

        Returns:
            (missing keys, unexpected keys).

        Raises:
            TypeError: this is no state dict, or a value is neither tensor nor array.
            ValueError: a shape differs, or no key matches; nothing is loaded.

        Source: `paddle.DataParallel.set_state_dict`, which only warns of a shape mismatch.
        """
        check_mapping(state_dict, "set_state_dict")
        if not use_structured_name:
            names = own_names(self.module)
            state_dict = {names.get(key, key): value for key, value in state_dict.items()}
        missing, unexpected = load_leniently(self.module, without_prefix(state_dict, self.module))
        self._loaded(missing)
        return missing, unexpected

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch does it, for names with or without `module.` or `_orig_mod.`, tensors or numpy arrays.

        Args:
            state_dict: what `state_dict()` of this wrapper, of the bare module, or of torch's
                `DistributedDataParallel` returned, compiled or not.
            strict: whether missing and unexpected keys raise.
            assign: whether the tensors themselves become the parameters.

        Returns:
            A named tuple (missing_keys, unexpected_keys).

        Raises:
            RuntimeError: as torch raises it, for a shape mismatch, and for differing keys if `strict`.
        """
        check_mapping(state_dict, "load_state_dict")
        own = without_prefix(state_dict, self.module)
        with naming_keys(state_dict, own):
            result = self.module.load_state_dict(own, strict=strict, assign=assign)
        self._loaded(result.missing_keys)
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _check_single_process() -> None:
    for variable in ("WORLD_SIZE", "PADDLE_TRAINERS_NUM"):
        value = os.environ.get(variable, "1")
        if value.isdecimal() and int(value) > 1:
            raise DPFuseError(
                f"{variable}={value} announces several ranks, but there is no process group; expected one, or "
                "every rank would train a model of its own. Call dpfuse.init_parallel_env() before wrapping."
            )
    warn_at_user(
        "there is no process group: DataParallel passes calls through and averages nothing. Call "
        "dpfuse.init_parallel_env() first if this is one of several processes."
    )
