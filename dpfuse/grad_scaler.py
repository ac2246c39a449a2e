"""torch's GradScaler whose unscaling and search for infinite values cost no pass over gradients. Knows no bucket."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import chain
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.autograd.graph import increment_version

from dpfuse.arguments import instance, integer, real
from dpfuse.engine.torch_private import leave_untraced, put_hooks
from dpfuse.errors import DPFuseError
from dpfuse.gradients.loss_scaling import LossScale
from dpfuse.wrapper import SyncedModule, loss_scale_of

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that leaves its passes over the gradients to the wrapped model, which packs them anyway.

    Use it like torch's. `backward()` divides the gradients by the scale while it packs them, and looks for NaN and
    infinite values; the ranks tell each other in the same all-reduce, so they all skip the same steps. So gradients are
    unscaled as soon as a synchronised backward has returned, and `unscale_` only takes note of that.

    What no wrapped model has packed is unscaled as by torch: parameters of others, and gradients that were accumulated
    inside `no_sync()` and not synchronised. So is a model whose gradients travel in float16, where unscaled ones would
    vanish, that adds up instead of averaging, or that has a communication hook.

    Args:
        device: type of the device; that of the first model by default.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as for torch's class.
        model: a `DataParallel` or `DistributedDataParallel`, or several of them. A copy or a pickle of the scaler
            has none, and works like torch's class; state dicts are torch's, both ways.

    Raises:
        TypeError: `model` is something else.
        DPFuseError: from `backward()`, where some ranks' losses are scaled and others' are not; or where a backward
            would accumulate scaled gradients on unscaled ones that `unscale_` was called for.

    Example:
        >>> import dpfuse, torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = dpfuse.GradScaler(model=model)
        >>> scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        >>> model.module.bias.grad
        tensor([3., 3.])
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> dist.destroy_process_group()

    Source: `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        model: SyncedModule | Iterable[SyncedModule],
    ) -> None:
        models: list[Any] = [model] if isinstance(model, nn.Module) or not isinstance(model, Iterable) else [*model]
        for one in models:
            if not isinstance(one, SyncedModule):
                remedy = "Wrap the module first; torch.amp.GradScaler is for one that is not wrapped"
                if hasattr(type(one), "replicated_by"):
                    remedy = "Pass its replicated_by"
                raise TypeError(
                    "model must be a dpfuse.DataParallel or dpfuse.DistributedDataParallel, or several of them, got "
                    f"{type(one).__name__}. {remedy}"
                )
        if not models:
            raise TypeError("model must be at least one wrapped model, got none")
        instance("device", device, (str, NoneType), 'None or a type of device, such as "cuda"')
        for name, value in (
            ("init_scale", init_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
        ):
            real(name, value)
        integer("growth_interval", growth_interval, 1)
        if device is None:
            device = next(models[0].parameters()).device.type
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._scales = [scale for one in models if self._enabled and (scale := loss_scale_of(one)) is not None]
        self._window = object()  # another one after each update

    def scale(self, outputs: Any) -> Any:
        """As torch's `scale`; a backward through what it returns is known to be that of a scaled loss."""
        if not isinstance(outputs, Tensor) and isinstance(outputs, Iterable):
            several = map(self.scale, outputs)
            return type(outputs)(several) if isinstance(outputs, (list, tuple)) else several
        scaled: Any = super().scale(outputs)
        if self._scales and self._enabled and scaled.requires_grad:
            put_hooks(scaled, {0: self._reached})
        return scaled

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's `step`.

        Raises:
            DPFuseError: the optimizer takes a `grad_scaler`, to unscale gradients that are unscaled.
        """
        if self._enabled and getattr(optimizer, "_step_supports_amp_scaling", False) and self._unscaled(optimizer):
            if "grad_scaler" in inspect.signature(optimizer.step).parameters:
                raise DPFuseError(
                    f"{type(optimizer).__name__}.step takes a grad_scaler, to unscale gradients itself, which "
                    "dpfuse.GradScaler has done in backward; expected an optimizer that does not. Use "
                    "torch.amp.GradScaler with it."
                )
            # Else a fused optimizer would divide by the scale once more.
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        for scale in self._scales:
            scale.holders.pop(id(optimizer), None)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's `update`."""
        super().update(new_scale)
        self._window = object()
        for scale in self._scales:
            scale.holders.clear()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_scales": [], "_window": None}

    def _reached(self, _grad: Tensor) -> None:
        assert self._scale is not None
        for scale in self._scales:
            scale.reached(self._scale, self._window)

    leave_untraced(_reached, calls=True)

    def _unscaled(self, optimizer: torch.optim.Optimizer) -> list[LossScale]:
        """Those of the optimizer's models of which some gradients carry no scale."""
        ids = {id(param) for param in _params_of(optimizer)}
        return [scale for scale in self._scales if not scale.unscaled.isdisjoint(ids)]

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        unscaled = self._unscaled(optimizer)
        params = _params_of(optimizer)
        ids = frozenset(map(id, params))
        done = frozenset(chain.from_iterable(scale.unscaled for scale in unscaled))
        known = frozenset(chain.from_iterable(scale.fresh for scale in unscaled))
        scaled = [param for param in params if id(param) not in done]
        # Unscaled by an earlier backward of this window, and frozen since. Its values may have changed.
        kept = [param for param in params if id(param) in done and id(param) not in known]
        found = super()._unscale_grads_(_holder_of(scaled), inv_scale, found_inf, allow_fp16)
        increment_version([param.grad for param in scaled if param.grad is not None])  # torch forgets to
        more = [scale.found for scale in unscaled if scale.found is not None and not scale.fresh.isdisjoint(ids)]
        if kept:
            one = torch.ones_like(inv_scale)
            more += super()._unscale_grads_(_holder_of(kept), one, torch.zeros_like(found_inf), allow_fp16).values()
        for each in more:
            before = found.get(each.device)
            # A tensor of its own: torch adds up in it what several optimizers have found.
            found[each.device] = each.clone() if before is None else before + each
        for scale in unscaled:
            scale.holders[id(optimizer)] = ids
        return found


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _holder_of(params: list[Tensor]) -> Any:
    """Return what torch's scaler takes for an optimizer of these parameters."""
    return SimpleNamespace(param_groups=[{"params": params}])
