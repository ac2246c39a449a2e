"""Scopes: they hold the parameters and buffers of programs between runs. Knows no executor."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpfuse import DPFuseError
from dpfuse.paddle.checks import instance
from dpfuse.paddle.static.fetch import to_numpy
from dpfuse.paddle.static.program import Objective, Program

__all__ = ["Scope", "ScopeVariable", "global_scope", "scope_guard"]


class ScopeVariable:
    """A named tensor of a scope; `numpy.array(variable)` copies its value.

    In Paddle a variable and its tensor are two objects. Here both are this object.

    Example:
        >>> import numpy
        >>> from dpfuse.paddle import static
        >>> variable = static.Scope().var("state")
        >>> variable.get_tensor().set([1.0, 2.0])
        >>> numpy.array(variable.get_tensor())
        array([1., 2.], dtype=float32)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tensor: Tensor | None = None
        self.owner: weakref.ref[nn.Module] | None = None  # the module of this variable

    @property
    def tensor(self) -> Tensor:
        """The torch tensor itself.

        Raises:
            DPFuseError: The variable has no value yet.
        """
        if self._tensor is None:
            raise DPFuseError(f"variable {self.name!r} of the scope has no value yet; expected set() before")
        return self._tensor

    def get_tensor(self) -> ScopeVariable:
        """Return this object, which has the methods of Paddle's tensors."""
        return self

    def set(self, value: Any) -> None:
        """Overwrite the value on its device.

        Args:
            value: an array, a tensor or numbers, with the shape of the old value.

        Raises:
            ValueError: The shape differs.
        """
        new = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        if self._tensor is None:
            self._tensor = new.clone()
            return
        if new.shape != self._tensor.shape:
            raise ValueError(
                f"variable {self.name!r} has shape {tuple(self._tensor.shape)}, got a value of shape "
                f"{tuple(new.shape)}; expected the same shape"
            )
        with torch.no_grad():
            self._tensor.copy_(new)

    def hold(self, tensor: Tensor, owner: nn.Module) -> None:
        """Use `tensor` of the program's module `owner` as the value."""
        self._tensor, self.owner = tensor, weakref.ref(owner)

    def shape(self) -> list[int]:
        """Return the sizes of the dimensions."""
        return list(self.tensor.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy of the value."""
        return to_numpy(self.tensor, self.name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)


class Scope:
    """Named variables for the runs of programs.

    In the global scope a program's variables are the parameters and buffers of its module, so a run trains the module.
    In any other scope they are copies, made when the scope first gets the program. A program and its clones share them.

    Example:
        >>> import torch
        >>> from dpfuse.paddle import static
        >>> program = static.Program()
        >>> with static.program_guard(program):
        ...     y = torch.nn.Linear(2, 1)(static.data("x", [None, 2]))
        >>> scope = static.Scope()
        >>> with static.scope_guard(scope):
        ...     _ = static.Executor("cpu").run(program, feed={"x": torch.ones(1, 2)})
        >>> [name.removeprefix(y.name) for name in scope.local_var_names()]
        ['.weight', '.bias']
    """

    def __init__(self) -> None:
        self._variables: dict[str, ScopeVariable] = {}
        self._optimizers: WeakKeyDictionary[Objective, torch.optim.Optimizer] = WeakKeyDictionary()
        # Per module: id of its tensor -> this tensor and our copy. The reference prevents another use of the id.
        self._copies: WeakKeyDictionary[nn.Module, dict[int, tuple[Tensor, Tensor]]] = WeakKeyDictionary()

    def find_var(self, name: str) -> ScopeVariable | None:
        """Return the variable `name`, or None."""
        return self._variables.get(instance("name", name, str))

    def var(self, name: str) -> ScopeVariable:
        """Return the variable `name`. Make it if there is none."""
        return self._variables.setdefault(instance("name", name, str), ScopeVariable(name))

    def local_var_names(self) -> list[str]:
        """Return the names of all variables."""
        return list(self._variables)

    def hold(self, program: Program, device: torch.device) -> dict[str, Tensor]:
        """Return the program's parameters and buffers in this scope, by name, on `device`.

        Missing ones are made. All are moved to the device, as `module.to(device)` does it.

        Raises:
            DPFuseError: A variable of the user or of another program has such a name, or a parameter is still lazy.
        """
        copies = self._copies.setdefault(program.root, {})
        held: dict[str, Tensor] = {}
        origins = program.variables
        for name, origin in origins.items():
            known = self._variables.get(name)
            if known is not None and (known.owner is None or known.owner() is not program.root):
                raise DPFuseError(
                    f"the scope already has a variable {name!r}, which is not this program's; expected names that only "
                    "this program and its clones use. Run it in another scope: `with scope_guard(Scope()):`."
                )
            if is_lazy(origin):
                raise DPFuseError(
                    f"{name!r} has no shape yet, because it is lazy; expected a module that has run on a batch"
                )
        for name, origin in origins.items():
            if id(origin) not in copies:
                copies[id(origin)] = (origin, self._made_of(origin))
            tensor = copies[id(origin)][1]
            held[name] = tensor
            self.var(name).hold(tensor, program.root)
        self.move(held.values(), device)
        return held

    def move(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Move variables and the state of their optimizers to `device`, unless they are there."""
        away = [tensor for tensor in tensors if tensor.device != device]
        for tensor in away:
            tensor.grad = None
            tensor.data = tensor.data.to(device)
        if away:
            for optimizer in self._optimizers.values():
                optimizer.load_state_dict(optimizer.state_dict())  # moves the state to the parameters' device

    def optimizer(self, objective: Objective, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of a training program in this scope. Executors share it with its state.

        Raises:
            TypeError: The program's factory does not return an optimizer.
            DPFuseError: There are no parameters.
        """
        if objective not in self._optimizers:
            if not parameters:
                raise DPFuseError(
                    f"the program minimises {objective.loss!r} but has no trainable parameter; expected at least one "
                    "with requires_grad=True"
                )
            optimizer = objective.optimizer(parameters)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    f"the optimizer given to minimize() returned a {type(optimizer).__name__}; expected a "
                    "torch.optim.Optimizer, such as lambda params: torch.optim.SGD(params, lr=0.1)"
                )
            self._optimizers[objective] = optimizer
        return self._optimizers[objective]

    def _made_of(self, origin: Tensor) -> Tensor:
        return copy.deepcopy(origin) if isinstance(origin, nn.Parameter) else origin.detach().clone()


class _GlobalScope(Scope):
    """Holds the tensors of the modules themselves, for as long as the modules live."""

    def _made_of(self, origin: Tensor) -> Tensor:
        return origin

    def hold(self, program: Program, device: torch.device) -> dict[str, Tensor]:
        known = program.root in self._copies
        held = super().hold(program, device)
        if not known:
            weakref.finalize(program.root, self._forget).atexit = False
        return held

    def _forget(self) -> None:
        self._variables = {
            name: variable
            for name, variable in self._variables.items()
            if variable.owner is None or variable.owner() is not None
        }


_scope: Scope = _GlobalScope()


def global_scope() -> Scope:
    """Return the scope in which executors run programs by default.

    Example:
        >>> from dpfuse.paddle import static
        >>> static.global_scope().find_var("never set") is None
        True
    """
    return _scope


@contextmanager
def scope_guard(scope: Scope) -> Iterator[None]:
    """Make `scope` the global scope inside the `with` block.

    Raises:
        TypeError: `scope` is no Scope.

    Example:
        >>> from dpfuse.paddle import static
        >>> mine = static.Scope()
        >>> with static.scope_guard(mine):
        ...     static.global_scope() is mine
        True
    """
    global _scope
    before, _scope = _scope, instance("scope", scope, Scope, "pass Scope()")
    try:
        yield
    finally:
        _scope = before
