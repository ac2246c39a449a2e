"""Programs: graphs of named variables, built under a guard. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain, count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn

from dpfuse import DPFuseError
from dpfuse.arguments import flag
from dpfuse.paddle.static.evaluation import in_evaluation_mode
from dpfuse.paddle.static.input_spec import InputSpec
from dpfuse.paddle.static.names import GRAD, suggestion
from dpfuse.paddle.static.variable import Recorder, Variable, tensors_of

__all__ = ["Objective", "Program"]

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss that a program minimises. `optimizer` makes an optimizer for the parameters of each replica."""

    loss: str
    optimizer: OptimizerFactory


class Program:
    """A graph of named variables that executors run. It is empty at first; build it under `program_guard`.

    A module that is called with a variable is one operation, and keeps the mode (training or evaluation) that it had
    then. Its result has the name of the module (`"linear_0"`), the result of a function that of the function (`"relu"`,
    `"relu_1"`). Parameters and buffers have dotted names, and `NAME@GRAD` is the gradient of a parameter or of an
    intermediate value.

    Example:
        >>> import torch
        >>> from dpfuse.paddle import static
        >>> program = static.Program()
        >>> with static.program_guard(program):
        ...     x, t = static.data("x", [None, 2]), static.data("t", [None, 1])
        ...     loss = torch.square(torch.nn.Linear(2, 1)(x) - t).mean()
        ...     program.minimize(loss, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> loss.name
        'mean'
    """

    def __init__(self) -> None:
        self.root = nn.Module()  # the modules and tensors that the graph uses are below it
        self.graph = fx.Graph()
        self.feeds: dict[str, InputSpec] = {}
        self.nodes: dict[str, fx.Node] = {}  # feeds and intermediate values; the last of a node's names is shown
        self.objective: Objective | None = None
        self.for_test = False
        self.recorder = Recorder(self)
        self.initialises: WeakSet[Program] = WeakSet()  # the main programs of this startup program

    @property
    def variables(self) -> dict[str, Tensor]:
        """The parameters and buffers that the graph uses, by dotted name. A tied one has several names."""
        used = {str(node.target) for node in self.graph.nodes if node.op in ("call_module", "get_attr")}

        def is_used(name: str) -> bool:
            return any(path in used for path in accumulate(name.split("."), "{}.{}".format))

        return {name: tensor for name, tensor in tensors_of(self.root) if is_used(name)}

    @property
    def stamp(self) -> tuple[Any, ...]:
        """A value that changes with every change of the graph, its names or the module's tensors."""
        return len(self.graph.nodes), *self.nodes, self.objective, *map(id, self.variables.values())

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
        flag("for_test", for_test)
        other = Program()
        other.root = self.root
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            copies[node] = other.graph.node_copy(node, copies.__getitem__)
            if for_test:
                in_evaluation_mode(copies[node])
        other.feeds = dict(self.feeds)
        other.nodes = {name: copies[node] for name, node in self.nodes.items()}
        other.for_test = self.for_test or for_test
        other.objective = None if other.for_test else self.objective
        return other

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
        return next(name for name, known in reversed(self.nodes.items()) if known is node)

    def add_name(self, node: fx.Node) -> None:
        """Name a new node after its feed, module or function. A number is added to a name that is taken."""
        name = str(node.target) if node.op in ("placeholder", "call_module") else node.name
        names = chain([name], (f"{name}_{number}" for number in count(1)))
        self.nodes[next(one for one in names if one not in self.nodes)] = node

    def rename(self, node: fx.Node, name: str) -> None:
        """Give a node's value a name. Its earlier names remain valid.

        Raises:
            TypeError, ValueError: `name` is not a string, is empty, is taken or ends like the name of a gradient.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a variable must be a string, got {name!r}")
        if self.nodes.get(name) is not node:
            self._check_free(name, "this variable")
        if node.op == "placeholder":
            raise ValueError(f"feed {node.target!r} cannot be renamed to {name!r}; its name is the key in a feed")
        self.nodes.pop(name, None)
        self.nodes[name] = node

    def add_feed(self, name: str, spec: InputSpec) -> Variable:
        """Append an input.

        Raises:
            ValueError: The name is taken.
        """
        self._check_free(name, "a feed")
        self.feeds[name] = spec
        return self.recorder.proxy(self.recorder.create_node("placeholder", name, (), {}))

    def _check_free(self, name: str, what: str) -> None:
        if not name or name.endswith(GRAD) or name in self.nodes or name in self.variables:
            raise ValueError(
                f"{name!r} cannot name {what}; expected a name that no other variable of the program has, without "
                f"{GRAD} at its end"
            )
