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


class Replica:
    """A program on one device, with its variables in one scope.

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
        self._order = list(program.graph.nodes)
        self._last_used_by = _last_uses(self._order)
        self._trains = False  # whether the gradients are those of the last run
        self._kept: dict[fx.Node, tuple[Any, int]] = {}  # values, and how often each had been written to

    def run(
        self,
        feed: Mapping[str, Any],
        names: Iterable[str],
        *,
        loss: str | None = None,
        seed: float | Tensor = 1.0,
    ) -> None:
        """Run the whole program forward and, if there is a loss, backward.

        Args:
            feed: arrays and tensors by name, already checked.
            names: the names with which `value` will be called. Other intermediate values are freed early.
            loss: name of the loss; None runs forward only, without gradients.
            seed: gradient of the loss.

        Raises:
            DPFuseError: An operation failed. The text names it and the device.
        """
        self.drop()
        self._trains = loss is not None
        if self._trains:
            self._clear_gradients()
        wanted = {name.removesuffix(GRAD) for name in names} | ({loss} if loss else set())
        keep = {self.nodes[name] for name in wanted if name in self.nodes}
        gradients = {name.removesuffix(GRAD) for name in names if name.endswith(GRAD)}
        retain = {self.nodes[name] for name in gradients if name in self.nodes}
        with torch.set_grad_enabled(loss is not None):
            self._forward(feed, keep, retain)
        if loss is not None:
            self._backward(loss, seed)

    def value(self, name: str) -> Any:
        """Return the present value of a variable or of a gradient. `run` must have had the name.

        Raises:
            DPFuseError: The value was overwritten in place, or there is no such gradient.
        """
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

    def _forward(self, feed: Mapping[str, Any], keep: set[fx.Node], retain: set[fx.Node]) -> None:
        values: dict[fx.Node, Any] = {}
        for node in self._order:
            try:
                value = self._computed(node, values, feed)
            except Exception as error:  # modules and functions are the user's
                names = {known: name for name, known in self.nodes.items()}
                raise self._failure(f"to compute {names.get(node, node.name)!r}", error) from error
            values[node] = value
            if node in keep:
                self._kept[node] = value, _writes(value)
                if node in retain and isinstance(value, Tensor) and value.requires_grad:
                    value.retain_grad()
            for used_up in self._last_used_by[node]:
                del values[used_up]
        self._take_assigned_buffers()

    def _take_assigned_buffers(self) -> None:
        """Copy buffers that a module has replaced into the scope's tensors, and give the module these tensors again."""
        for path, module in self._modules.items():
            for owner_path, owner in module.named_modules(prefix=path):
                for name, buffer in owner._buffers.items():
                    held = self.tensors.get(f"{owner_path}.{name}")
                    if buffer is not None and held is not None and buffer is not held:
                        held.copy_(buffer.detach())
                        owner._buffers[name] = held

    def _computed(self, node: fx.Node, values: dict[fx.Node, Any], feed: Mapping[str, Any]) -> Any:
        target: Any = node.target
        if node.op == "placeholder":
            return to_tensor(feed[target], self.device)
        if node.op == "get_attr":
            return self.tensors[target]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "call_module":
            return self._modules[target](*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

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


def _last_uses(order: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the values that no later node needs."""
    freed: dict[fx.Node, list[fx.Node]] = {node: [] for node in order}
    seen: set[fx.Node] = set()
    for node in reversed(order):
        for value in [node, *node.all_input_nodes]:
            if value not in seen:
                seen.add(value)
                freed[node].append(value)
    return freed
