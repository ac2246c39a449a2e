"""One device's copy of a program: runs the graph forward and backward on its own tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from dpfuse import DPFuseError
from dpfuse.paddle.static.evaluation import set_mode
from dpfuse.paddle.static.feed import to_tensor
from dpfuse.paddle.static.names import GRAD
from dpfuse.paddle.static.program import Program
from dpfuse.paddle.static.scope import Scope

__all__ = ["Replica"]


class Replica(fx.Interpreter):
    """A program on one device, with its variables in one scope. torch's interpreter runs the graph.

    The modules are copies of the program's modules, with the tensors of the scope. So replicas can run at the same
    time, and test programs can run in another mode than training programs.

    Later changes of the program have no effect.

    Attributes:
        nodes: feeds and intermediate values of the program, by name.
        tensors: parameters and buffers, by name. A tied one has several names.
        trainable: the parameters with requires_grad, by their first names.
        optimizer: the scope's optimizer of a training program.
    """

    def __init__(self, program: Program, scope: Scope, device: torch.device, index: int = 0) -> None:
        super().__init__(program.root, graph=program.graph)
        self.extra_traceback = False  # `_failure` says more
        self.device = device
        self.index = index
        self.nodes = dict(program.nodes)
        self.tensors = scope.hold(program, device)
        first_names = {id(tensor): name for name, tensor in reversed(self.tensors.items())}
        self.trainable = {
            name: tensor
            for name, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and first_names[id(tensor)] == name
        }
        self.optimizer = None
        if program.objective is not None:
            self.optimizer = scope.optimizer(program.objective, list(self.trainable.values()))
        self._modules = _modules_of(program, self.tensors)
        self._trains = False  # whether the gradients are those of the last run
        self._feed: Mapping[str, Any] = {}
        self._keep: set[fx.Node] = set()  # nodes whose values are kept
        self._retain: set[fx.Node] = set()  # nodes whose gradients are kept
        self._kept: dict[fx.Node, tuple[Any, int]] = {}  # values, and how often each had been written to

    def run_once(
        self,
        feed: Mapping[str, Any],
        names: Iterable[str],
        *,
        loss: str | None = None,
        seed: float | Tensor = 1.0,
    ) -> None:
        """Run the whole program forward and, if there is a loss, backward from its gradient `seed`.

        The feed is already checked. `value` will be called with `names`; other intermediate values are freed early.
        """
        self.drop()
        self._trains = loss is not None
        if self._trains:
            self._clear_gradients()
        wanted = {name.removesuffix(GRAD) for name in names} | ({loss} if loss else set())
        self._feed = feed
        self._keep = {self.nodes[name] for name in wanted if name in self.nodes}
        gradients = {name.removesuffix(GRAD) for name in names if name.endswith(GRAD)}
        self._retain = {self.nodes[name] for name in gradients if name in self.nodes}
        with torch.set_grad_enabled(loss is not None):
            try:
                super().run()
            finally:
                self._feed, self.env = {}, {}  # an error, or a value without a use, would keep memory
            self._take_assigned_buffers()
        if loss is not None:
            self._backward(loss, seed)

    def value(self, name: str) -> Any:
        """Return the present value of a variable or of a gradient. `run_once` must have had the name."""
        base = name.removesuffix(GRAD)
        node = self.nodes.get(base)
        if node is None:
            value = self.tensors[base]
        else:
            value, writes = self._kept[node]
            if base == name and _writes(value) != writes:
                raise DPFuseError(
                    f"{name!r} cannot be fetched: a later operation overwrote it in place. Use an out-of-place version "
                    "of that operation, or fetch its result."
                )
        if base == name:
            return value
        gradient = value.grad if isinstance(value, Tensor) else None
        if gradient is None:
            raise DPFuseError(
                f"{name!r} cannot be fetched: the loss does not depend on {base!r}, or that needs no gradient, like "
                "feeds, buffers and frozen parameters. Fetch gradients of values from which the loss is computed."
            )
        return gradient

    def update(self) -> None:
        """Step the optimizer."""
        if self.optimizer is not None:
            self.optimizer.step()

    def drop(self) -> None:
        """Release the intermediate values and gradients of the last run."""
        self._kept = {}
        if self._trains:
            self._clear_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self.trainable.values():
            parameter.grad = None

    def run_node(self, n: fx.Node) -> Any:
        """Compute one value. Keep it if it will be fetched."""
        try:
            value = super().run_node(n)
        except Exception as error:  # modules and functions are the user's
            names = {known: name for name, known in self.nodes.items()}
            raise self._failure(f"to compute {names.get(n, n.name)!r}", error) from error
        if n in self._keep:
            self._kept[n] = value, _writes(value)
            if n in self._retain and isinstance(value, Tensor) and value.requires_grad:
                value.retain_grad()
        return value

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Tensor:
        """Return a fed value."""
        return to_tensor(self._feed[target], self.device)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Tensor:
        """Return a tensor of the scope."""
        return self.tensors[target]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call the copy of a module."""
        return self._modules[target](*args, **kwargs)

    def _take_assigned_buffers(self) -> None:
        """Copy buffers that a module has replaced into the scope's tensors, and give the module these tensors again."""
        for path, module in self._modules.items():
            for owner_path, owner in module.named_modules(prefix=path):
                for name, buffer in owner._buffers.items():
                    held = self.tensors.get(f"{owner_path}.{name}")
                    if buffer is not None and held is not None and buffer is not held:
                        held.copy_(buffer.detach())
                        owner._buffers[name] = held

    def _backward(self, name: str, seed: float | Tensor) -> None:
        loss, _ = self._kept[self.nodes[name]]
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise DPFuseError(
                f"loss {name!r} has {got}, or depends on no trainable parameter; expected a tensor of one element that "
                "depends on one. Reduce it with mean() or sum()."
            )
        if isinstance(seed, Tensor):
            gradient = seed.to(loss.device, loss.dtype).reshape(loss.shape)
        else:
            gradient = torch.full_like(loss, seed)
        try:
            loss.backward(gradient)
        except Exception as error:
            raise self._failure(f"in the backward of {name!r}", error) from error

    def _failure(self, what: str, error: Exception) -> DPFuseError:
        return DPFuseError(f"device {self.index} ({self.device}) failed {what}: {type(error).__name__}: {error}")


def _writes(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _modules_of(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """Return copies of the modules that the program calls, with the scope's parameters and buffers."""
    memo: dict[int, Any] = {id(origin): tensors[name] for name, origin in program.variables.items()}
    modules: dict[str, nn.Module] = {}
    for node in program.graph.nodes:
        if node.op == "call_module" and node.target not in modules:
            module = copy.deepcopy(program.root.get_submodule(str(node.target)), memo)
            set_mode(node, module)
            modules[str(node.target)] = module.eval() if program.for_test else module
    return modules
