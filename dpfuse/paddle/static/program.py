"""Programs: graphs of named variables, captured from a module or built under a guard. Runs nothing."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn

from dpfuse import DPFuseError
from dpfuse.paddle.static.capture import captured
from dpfuse.paddle.static.declarations import (
    REQUIRED,
    Feed,
    Objective,
    OptimizerFactory,
    VariableInfo,
    VariableKind,
)
from dpfuse.paddle.static.evaluation import in_evaluation_mode
from dpfuse.paddle.static.names import GRAD, automatic_names, suggestion
from dpfuse.paddle.static.variable import Recorder, Variable

__all__ = ["Program"]


class Program:
    """A graph of named variables that executors run.

    `Program(module)` captures `module.forward` by symbolic tracing. The arguments of forward are the feeds. The result
    of a layer is named by its path (`"fc1"`, `"layer1.conv"`), the result of a function by the function (`"relu"`,
    `"relu_1"`). If forward returns a dictionary, its keys are names, too. `Program()` is empty; build it under
    `program_guard`. In both, parameters and buffers have dotted names, and `NAME@GRAD` is the gradient of a parameter
    or of an intermediate value.

    Tracing cannot follow control flow that depends on values. Put such a part into a module and build the program under
    `program_guard`, where each module is one operation. Modules keep the mode (training or evaluation) that they had
    when the program was captured. The same holds for Python branches on `self.training`.

    Args:
        module: the module to capture; None makes an empty program.

    Raises:
        TypeError: `module` is not a module.
        ValueError: `module` cannot be traced, or a name is ambiguous.

    Example:
        >>> import torch
        >>> from dpfuse.paddle import static
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc = torch.nn.Linear(2, 1)
        ...     def forward(self, x, t):
        ...         y = self.fc(x)
        ...         return {"y": y, "loss": torch.square(y - t).mean()}
        >>> program = static.Program(Net())
        >>> program.minimize("loss", lambda params: torch.optim.SGD(params, lr=0.1))
        >>> print(program)
        feed x
        feed t
        parameter fc.weight: float32[1, 2]
        parameter fc.bias: float32[1]
        y = fc(x)
        sub = sub(y, t)
        square = square(sub)
        loss = mean(square)
        minimize loss
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(
                f"module must be an nn.Module or None, got {type(module).__name__}; pass the network itself"
            )
        self.root = nn.Module() if module is None else module
        self.graph = fx.Graph() if module is None else captured(module)
        self.objective: Objective | None = None
        self.for_test = False
        self.recorder = Recorder(self)
        self.initialises: WeakSet[Program] = WeakSet()  # the main programs of this startup program
        self._named: dict[str, fx.Node] = {}  # names that the user chose; a node may have several
        self._feeds: dict[fx.Node, Feed] = {}
        if module is not None:
            self._name_inputs_and_outputs(module)

    @classmethod
    def capture(cls, module: nn.Module) -> Program:
        """Return `Program(module)`."""
        if module is None:
            raise TypeError("module must be an nn.Module, got None")
        return cls(module)

    @property
    def feeds(self) -> dict[str, Feed]:
        """The inputs, by name."""
        return {feed.name: feed for feed in self._feeds.values()}

    @property
    def variables(self) -> dict[str, Tensor]:
        """The parameters and buffers that the graph uses, by dotted name. A tied one has several names."""
        modules = {str(node.target) for node in self.graph.nodes if node.op == "call_module"}
        tensors = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        found: dict[str, Tensor] = {}
        for named in (self.root.named_parameters, self.root.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                parts = name.split(".")
                if name in tensors or any(".".join(parts[:length]) in modules for length in range(1, len(parts))):
                    found[name] = tensor
        for name in sorted(tensors - found.keys()):
            value = _attribute(self.root, name)
            if isinstance(value, Tensor):  # a tensor attribute that is neither parameter nor buffer
                found[name] = value
        return found

    @property
    def nodes(self) -> dict[str, fx.Node]:
        """The feeds and intermediate values by name. A node may have several names."""
        return {**{name: node for node, name in self._names().items()}, **self._automatic_names(), **self._named}

    @property
    def stamp(self) -> tuple[Any, ...]:
        """A value that changes with every change of the graph, its names or the module's tensors."""
        return len(self.graph.nodes), *self._named, self.objective, *map(id, self.variables.values())

    def minimize(self, loss: str | Variable, optimizer: OptimizerFactory) -> None:
        """Make this a training program: each run ends with an optimizer step on the gradients of `loss`.

        Args:
            loss: a variable, or its name. Its value must have one element.
            optimizer: a function, called once per device with the list of trainable parameters. It returns a
                `torch.optim.Optimizer`. A class such as `torch.optim.Adam` also works.

        Raises:
            TypeError: `optimizer` cannot be called.
            ValueError: There is no such variable.
            DPFuseError: The program is a test program, or already has a loss.
        """
        if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
            raise TypeError(
                f"optimizer must be a function of a parameter list that returns an optimizer, got "
                f"{type(optimizer).__name__}; pass for example lambda params: torch.optim.SGD(params, lr=0.1)"
            )
        if self.for_test:
            raise DPFuseError("minimize() on a program cloned for test; expected the training program")
        if self.objective is not None:
            raise DPFuseError(f"the program already minimises {self.objective.loss!r}; expected one minimize() each")
        self.objective = Objective(self.computed(loss, "loss"), optimizer)

    def clone(self, for_test: bool = False) -> Program:
        """Return a copy of the present graph, with the same names and variables.

        Args:
            for_test: True runs modules in evaluation mode, gives functions such as `F.dropout` and `F.batch_norm` the
                argument `training=False`, and leaves out the optimizer.

        Returns:
            The copy. In the same scope it shares parameters and buffers with this program.
        """
        other = Program()
        other.root = self.root
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            copies[node] = other.graph.node_copy(node, copies.__getitem__)
            if for_test:
                in_evaluation_mode(copies[node])
        other._named = {name: copies[node] for name, node in self._named.items()}
        other._feeds = {copies[node]: feed for node, feed in self._feeds.items()}
        other.for_test = self.for_test or for_test
        other.objective = None if other.for_test else self.objective
        return other

    def list_vars(self) -> list[VariableInfo]:
        """Return all variables: feeds, parameters, buffers, intermediate values."""
        listed = [VariableInfo(feed.name, VariableKind.FEED, feed.shape, feed.dtype) for feed in self._feeds.values()]
        for name, tensor in self.variables.items():
            kind = VariableKind.PARAMETER if isinstance(tensor, nn.Parameter) else VariableKind.BUFFER
            listed.append(VariableInfo(name, kind, tuple(tensor.shape), tensor.dtype))
        computed = (name for node, name in self._names().items() if node not in self._feeds)
        return listed + [VariableInfo(name, VariableKind.INTERMEDIATE) for name in computed]

    def check_name(self, name: Any, what: str) -> None:
        """Raise if `name` is neither a variable nor the gradient of a variable.

        Raises:
            TypeError: `name` is no string.
            ValueError: There is no such variable; the nearest names are suggested.
        """
        if not isinstance(name, str):
            raise TypeError(f"{what} must be a variable or its name, got {name!r} of type {type(name).__name__}")
        known = [*self.nodes, *self.variables]
        if name.removesuffix(GRAD) not in known:
            names = [f"{one}{GRAD}" for one in known] if name.endswith(GRAD) else known
            raise ValueError(f"{what} {name!r} is no variable of the program. {suggestion(name, names)}")

    def computed(self, variable: str | Variable, what: str) -> str:
        """Return the name of an intermediate value, checked.

        Raises:
            TypeError, ValueError: As for `check_name`; or `variable` is something else, such as a parameter.
        """
        name = variable.name if isinstance(variable, Variable) else variable
        self.check_name(name, what)
        if name not in self.nodes or name in self.feeds:
            raise ValueError(f"{what} {name!r} is not computed by the program; expected the name of a computed value")
        return name

    def name_of(self, node: fx.Node) -> str:
        """Return the name of a node's value. If there are several, return the one that is shown."""
        return self._names()[node]

    def rename(self, node: fx.Node, name: str) -> None:
        """Give a node's value a name. Its earlier names remain valid.

        Raises:
            TypeError, ValueError: `name` is not a string, is empty, is taken or ends like the name of a gradient.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a variable must be a string, got {name!r}")
        owner = self.nodes.get(name)
        if not name or name.endswith(GRAD) or name in self.variables or owner not in (None, node):
            raise ValueError(
                f"{name!r} cannot name this variable; expected a name that no other variable of the program has, "
                f"without {GRAD} at its end"
            )
        if node in self._feeds:
            raise ValueError(
                f"feed {self._feeds[node].name!r} cannot be renamed to {name!r}; its name is the key in a feed"
            )
        self._named.pop(name, None)
        self._named = {name: node, **self._named}  # the first name is shown

    def add_feed(self, feed: Feed) -> Variable:
        """Append an input.

        Raises:
            ValueError: The name is taken.
        """
        if feed.name.endswith(GRAD) or feed.name in self.nodes or feed.name in self.variables:
            raise ValueError(
                f"{feed.name!r} cannot name a feed; expected a name that no other variable of the program has, without "
                f"{GRAD} at its end"
            )
        node = self.recorder.create_node("placeholder", feed.name, (), {})
        self._feeds[node] = feed
        return self.recorder.proxy(node)

    def __str__(self) -> str:
        names = self._names()

        def text(value: Any) -> str:
            return names.get(value, str(value.target)) if isinstance(value, fx.Node) else repr(value)

        lines = []
        for info in self.list_vars():
            known = "" if info.shape is None else f": {str(info.dtype).removeprefix('torch.')}{list(info.shape)}"
            if info.kind is not VariableKind.INTERMEDIATE:
                lines.append(f"{info.kind.value} {info.name}{known}")
        for node, name in names.items():
            if node not in self._feeds and node.op != "get_attr":
                arguments = [text(value) for value in node.args]
                arguments += [f"{key}={text(value)}" for key, value in node.kwargs.items()]
                operation = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
                lines.append(f"{name} = {operation}({', '.join(arguments)})")
        if self.objective is not None:
            lines.append(f"minimize {self.objective.loss}")
        return "\n".join(lines)

    def _names(self) -> dict[fx.Node, str]:
        """Return one name of each feed and each intermediate value, in the order of the graph."""
        chosen = {node: feed.name for node, feed in self._feeds.items()}
        for name, node in self._named.items():
            chosen.setdefault(node, name)
        automatic = {node: name for name, node in self._automatic_names().items()}
        computed = (node for node in self.graph.nodes if node in chosen or node in automatic)
        return {node: chosen.get(node) or automatic[node] for node in computed}

    def _automatic_names(self) -> dict[str, fx.Node]:
        """Return the automatic names of intermediate values."""
        return automatic_names(self.graph, self._named, {*self.feeds, *self.variables})

    def _name_inputs_and_outputs(self, module: nn.Module) -> None:
        what = f"forward of {type(module).__name__}"
        for node in [node for node in self.graph.nodes if node.op == "placeholder"]:
            name = str(node.target)
            if name.startswith("*"):
                raise ValueError(f"{what} takes {name}; expected only named arguments, because feeds have names")
            if name in self.variables:
                raise ValueError(f"{what} has an argument {name!r} with a parameter's name; expected different names")
            self._feeds[node] = Feed(name, default=node.args[0] if node.args else REQUIRED)
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        if isinstance(output.args[0], dict):
            for key, node in output.args[0].items():
                if not isinstance(node, fx.Node):
                    raise ValueError(f"{what} returns {node!r} as {key!r}; expected a computed tensor for each key")
                known = isinstance(key, str) and (key in self.variables or key in self.nodes)
                if known and (self.nodes.get(key) is node or (node.op, node.target) == ("get_attr", key)):
                    continue
                if known or not isinstance(key, str) or not key or key.endswith(GRAD):
                    raise ValueError(
                        f"{what} returns {key!r}, which cannot name this value; expected a string that names no "
                        f"other variable, without {GRAD} at its end"
                    )
                self._named[key] = node


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value
