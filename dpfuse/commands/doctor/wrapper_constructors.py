"""Notes each wrapper that the program makes. A run may put torch's class in the place of dpfuse's, or the reverse."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpfuse.commands.doctor.replaced_function import replace
from dpfuse.commands.own_wrappers import FACES, changes_numbers, for_torch, hear_constructors
from dpfuse.ddp.patch import TORCH_INTERNAL, Patch
from dpfuse.engine.plan import MB
from dpfuse.model.options import CommonOptions

__all__ = ["WrapperConstructors"]

TORCH_CLASS: Any = nn.parallel.DistributedDataParallel  # whose constructor is replaced
# The runs of dpfuse's classes, and arguments that these get then, unless the program passes them.
OURS: dict[str, CommonOptions] = {"dpfuse": {}, "narrow": {"wire_dtype": torch.bfloat16}, "tuned": {}}


class WrapperConstructors:
    """Hears the constructors of torch's class and of dpfuse's from now on.

    Args:
        run: the wrapper of the request, which says what is made.
        made: called with each wrapper.

    Attributes:
        replaceable: how many are of torch's class itself, or of dpfuse's, which take each other's place.
        derived: names of the classes that derive from these.
        own: whether the program has written dpfuse's class itself.
        numeric: its arguments with which numbers are not those of torch's class.
    """

    def __init__(self, run: str, made: Callable[[Any], None]) -> None:
        self._run = run
        self._tell = made
        self.replaceable = 0
        self.derived: dict[str, None] = {}
        self.own = False
        self.numeric: dict[str, None] = {}
        replace(TORCH_CLASS, "__init__", self._construct_torchs)
        self._torchs = TORCH_CLASS.__init__
        hear_constructors(self._construct_ours)
        if run in OURS:
            Patch({})  # classes that derive from torch's come to torch's constructor

    def _construct_torchs(self, plain: Any, /, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """The constructor of torch's class: gives the wrapper other buckets where the run says so."""
        inner = _caller().startswith(TORCH_INTERNAL)
        if self._run == "torch buckets" and not inner:
            # A size may come by its place.
            kwargs = inspect.signature(plain).bind(wrapper, module, *args, **kwargs).arguments
            kwargs["bucket_cap_mb"] = _an_eighth_of(module)
            kwargs.pop("bucket_cap_mb_list", None)
            plain(**kwargs)
        else:
            plain(wrapper, module, *args, **kwargs)
        if not inner:
            self._made(wrapper)

    def _construct_ours(
        self, plain: Callable[..., None], wrapper: Any, is_own: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """The constructor of dpfuse's classes: makes torch's where the run says so."""
        self.own |= is_own
        self.numeric |= dict.fromkeys(changes_numbers(kwargs))
        if self._run in OURS or type(wrapper) not in FACES:
            # A run goes on after a finding, so that all is seen.
            plain(wrapper, *args, **{"check_training": "warn", **OURS.get(self._run, {}), **kwargs})
            self._made(wrapper)
            return
        object.__setattr__(wrapper, "__class__", TORCH_CLASS)  # as `patch()` does it the other way round
        self._torchs(wrapper, **for_torch(plain, args, kwargs))

    def _made(self, wrapper: Any) -> None:
        if type(wrapper) in (*FACES, TORCH_CLASS):
            self.replaceable += 1
        else:
            self.derived.setdefault(type(wrapper).__name__)
        self._tell(wrapper)


def _caller() -> str:
    """Return the name of the module that makes a wrapper, three calls above; that of `patch()` passes calls on."""
    frame = sys._getframe(3)
    if frame.f_globals.get("__name__") == Patch.__module__ and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _an_eighth_of(module: nn.Module) -> float:
    """Return a size in MB, of which the gradients of a module fill about eight."""
    nbytes = sum(param.numel() * param.element_size() for param in module.parameters() if param.requires_grad)
    return max(nbytes / MB / 8, 1e-5)
