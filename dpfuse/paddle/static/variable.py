"""Variables of a program under construction: operations on them are recorded instead of executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn, Protocol

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from dpfuse import DPFuseError
from dpfuse.paddle.static.evaluation import remember_mode
from dpfuse.paddle.static.input_spec import InputSpec

__all__ = ["NamedGraph", "Recorder", "Variable", "modules_recorded", "tensors_of"]

_count: Counter[str] = Counter()  # of automatic names; one per process, so that no two programs use the same name


class NamedGraph(Protocol):
    """What variables use of their program: named nodes of a graph, whose modules and tensors are below one root."""

    root: nn.Module
    graph: fx.Graph
    feeds: dict[str, InputSpec]

    def add_name(self, node: fx.Node) -> None:
        """Give a new node's value a name."""

    def name_of(self, node: fx.Node) -> str:
        """Return the name of a node's value."""

    def rename(self, node: fx.Node, name: str) -> None:
        """Give a node's value a name."""


class Variable(fx.Proxy):
    """One value of a program under `program_guard`.

    torch functions, operators, methods and modules can be applied to it; each is recorded, and its result is
    again a `Variable`. Its value exists only while an executor runs the program.

    Attributes:
        name: the name for a fetch. It is set automatically; assign another name if you like.
        shape: for a variable made by `data`, the declared shape, with -1 for unknown sizes. For other variables it is
            an operation of the program: you can compute with it, but it has no value yet.
        dtype: as for `shape`.

    Example:
        >>> import torch
        >>> from dpfuse.paddle import static
        >>> program = static.Program()
        >>> with static.program_guard(program):
        ...     x = static.data("x", [None, 2])
        ...     y = torch.relu(x) * 2
        ...     y.name = "y"
        >>> y
        Variable('y')
        >>> x.shape
        (-1, 2)
    """

    tracer: Recorder

    @property
    def name(self) -> str:
        return self.tracer.program.name_of(self.node)

    @name.setter
    def name(self, name: str) -> None:
        self.tracer.program.rename(self.node, name)

    @property
    def shape(self) -> Any:
        feed = self.tracer.program.feeds.get(self.name)
        return fx.proxy.Attribute(self, "shape") if feed is None else feed.shape

    @property
    def dtype(self) -> Any:
        feed = self.tracer.program.feeds.get(self.name)
        return fx.proxy.Attribute(self, "dtype") if feed is None else feed.dtype

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: `minimize` or a loss name adds backward to a program."""
        raise DPFuseError(
            f"backward() of variable {self.name!r} cannot be recorded; expected program.minimize(loss, optimizer), or "
            "ParallelExecutor(loss_name=...) for gradients without an optimizer"
        )

    def __repr__(self) -> str:
        return f"Variable({self.name!r})"


class Recorder(fx.proxy.GraphAppendingTracer):
    """Appends operations on variables to a program's graph, and registers their modules and tensors there.

    Attributes:
        program: the program.
        active: number of active `program_guard`s of the program.
    """

    def __init__(self, program: NamedGraph) -> None:
        super().__init__(program.graph)
        self.program = program
        self.active = 0

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variable:
        """Record one call of a module, without the operations inside it."""
        result = self.create_proxy("call_module", self._registered(module), args, kwargs)
        remember_mode(result.node, module)
        return result  # type: ignore[return-value]

    def proxy(self, node: fx.Node) -> Variable:
        return Variable(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if not self.active:
            raise DPFuseError(
                "an operation on a Variable was called outside `with program_guard(program):` of its program; expected "
                "it inside. Build the whole program under one guard, and fetch values to read them."
            )
        node = super().create_node(kind, *args, **kwargs)
        if kind != "get_attr":
            self.program.add_name(node)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self.create_node("get_attr", self._held(a), (), {})
        if isinstance(a, fx.Proxy) and a.node.graph is not self.graph:
            raise DPFuseError(
                f"variable {a.node.name!r} belongs to another program; expected variables of one program. Build "
                "both under the same program_guard."
            )
        return super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> NoReturn:
        raise DPFuseError(f"{_no_control_flow(obj)} Use torch.where, or put the branch into a module.")

    def iter(self, obj: fx.Proxy) -> NoReturn:
        raise DPFuseError(f"{_no_control_flow(obj)} Index it, or put the loop into a module.")

    def _registered(self, module: nn.Module) -> str:
        """Return the path of a module below the program's root. Add it there if it is new."""
        root = self.program.root
        for path, known in root.named_modules(remove_duplicate=False):
            if known is module:
                return str(path)
        name = _unique(type(module).__name__.lower(), root)
        root.add_module(name, module)
        return name

    def _held(self, tensor: Tensor) -> str:
        """Return the path of a tensor below the program's root. Add it there if it is new."""
        root = self.program.root
        for path, known in tensors_of(root):
            if known is tensor:
                return path
        if isinstance(tensor, nn.Parameter):
            name = _unique("parameter", root)
            root.register_parameter(name, tensor)
        elif tensor.requires_grad:
            raise DPFuseError(
                f"a tensor of shape {tuple(tensor.shape)} with requires_grad=True, which is no parameter, was used in "
                "a program; expected an nn.Parameter itself, or a tensor without gradient. Compute with parameters "
                "inside a module, or detach() it."
            )
        else:
            name = _unique("constant", root)
            root.register_buffer(name, tensor)
        return name


def tensors_of(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, with each of their names."""
    return chain(root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False))


@contextmanager
def modules_recorded() -> Iterator[None]:
    """Record calls of modules with a `Variable` inside the block. Other calls work as usual."""
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, fx.Proxy) and isinstance(leaf.tracer, Recorder):
                return leaf.tracer.call_module(module, args, kwargs)
        return original(module, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def _unique(kind: str, root: nn.Module) -> str:
    while True:
        name = f"{kind}_{_count[kind]}"
        _count[kind] += 1
        if not hasattr(root, name):
            return name


def _no_control_flow(obj: fx.Proxy) -> str:
    return (
        f"variable {obj.node.name!r} controls a branch or loop, but has a value only when the program runs; expected "
        "operations that are the same for every value."
    )
