"""Training programs made at random: each acts on a wrapped module, and on a plain one that is averaged by hand.

The rule of averaging is that of the documents: a backward that synchronises gives each parameter the mean of what the
ranks have accumulated in its gradient since the last one, if any rank has accumulated something. A backward inside
`no_sync()` synchronises if a forward before it, outside, has had no backward.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import dpfuse
from tests.random_programs.agreement import agree_on, what_is_wrong
from tests.random_programs.by_hand import average, changed, gradients_of

__all__ = ["OPTIONS", "WEIGHTS", "Net", "Program", "run"]

OPTIONS: list[dict[str, Any]] = [
    {"small": True},  # stands for the options of sizes, which the two classes call differently
    {"buffers": True},
    {"views": False},
    {"deterministic": True},
    {"find_unused_parameters": True},
    {"check_finite": "raise"},
    {"check_training": "off"},
    {"accumulate_in_buckets": True},
    {"metrics": True},
]
WITH_WHOLE_GRADIENTS = 2  # the last ones, which a sharded optimizer excludes
# A bias before a norm has a gradient of nothing but rounding errors, which a small `eps` would make steps of.
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, float]]] = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.01, "eps": 1e-6}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}),
    (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-6}),
    (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-6}),
]


class PlannedError(RuntimeError):
    """An error that a program makes on purpose."""


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise PlannedError("in backward")


class Net(nn.Module):
    """A trunk with branches that a forward may use or not, perhaps with a tied head and a parameter without use.

    Args:
        shared: random numbers, the same on all ranks.
    """

    def __init__(self, shared: random.Random) -> None:
        super().__init__()
        self.width = width = shared.choice([3, 5, 8])
        self.stem = nn.Linear(4, width)
        self.branches = nn.ModuleList([self.branch(shared.choice([2, 7, 16])) for _ in range(shared.randint(1, 4))])
        self.norm = nn.BatchNorm1d(width) if shared.random() < 0.4 else nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3)) if shared.random() < 0.3 else None
        self.head = nn.Linear(width, 2)
        self.tied = nn.Linear(width, 2) if shared.random() < 0.3 else None
        if self.tied is not None:
            self.tied.weight = self.head.weight
        self.observer = nn.Module()
        self.observer.register_buffer("first", torch.zeros(2))
        self.observer.register_buffer("seen", torch.zeros(3))
        self.observer.register_buffer("last", torch.zeros(2, 2))
        self.double()

    def branch(self, middle: int) -> nn.Module:
        """Return a new branch."""
        return nn.Sequential(nn.Linear(self.width, middle), nn.Tanh(), nn.Linear(middle, self.width)).double()

    def forward(self, x: Tensor, use: Sequence[int] = (), recompute: str = "", fail: str = "") -> dict[str, Tensor]:
        hidden = self.stem(x).tanh()
        for index, branch in enumerate(self.branches):
            if index in use:
                more = (
                    checkpoint(branch, hidden, use_reentrant=recompute == "reentrant") if recompute else branch(hidden)
                )
                hidden = hidden + more
        if self.training:
            for number, buffer in enumerate(self.observer.buffers()):
                buffer.add_(hidden.detach().mean() + number)
        if fail == "forward":
            raise PlannedError("in forward")
        hidden = self.norm(hidden) * self.scale
        if fail == "backward":
            hidden = _RaisesInBackward.apply(hidden)
        out = self.head(hidden)
        if self.tied is not None:
            out = out + self.tied(hidden * hidden)
        return {"out": out, "hidden": hidden}


def _set_to_storage(buffer: Tensor, length: int) -> None:
    buffer.set_(torch.empty(40, dtype=buffer.dtype).untyped_storage(), 1, (length,), (1,))


def _assign(buffer: Tensor, length: int) -> None:
    buffer.data = torch.empty(length, dtype=buffer.dtype)


def _assign_slice(buffer: Tensor, length: int) -> None:
    memory = torch.empty(40, dtype=buffer.dtype)
    buffer.data = memory[: len(buffer)]
    buffer.data = memory[:length]


# What gives a buffer another length, in the same tensor.
IN_PLACE: dict[str, Callable[[Tensor, int], object]] = {
    "resize_": lambda buffer, length: buffer.resize_(length),
    "data": _assign,
    "a slice": _assign_slice,
    "set_": _set_to_storage,
}


def _halve(param: nn.Parameter) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


def _drop_entries(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    for param in params:
        if param in optimizer.state:
            del optimizer.state[param]


# What resets the states of some parameters of an optimizer, or of all of them.
RESETS: dict[str, Callable[[Any, Sequence[nn.Parameter]], object]] = {
    "pop": lambda optimizer, params: [optimizer.state.pop(param, None) for param in params],
    "del": _drop_entries,
    "empty entries": lambda optimizer, params: [optimizer.state.__setitem__(param, {}) for param in params],
    "update": lambda optimizer, params: optimizer.state.update({param: {} for param in params}),
    "clear": lambda optimizer, params: optimizer.state.clear(),
    "assign": lambda optimizer, params: setattr(optimizer, "state", defaultdict(dict)),
}


LOSSES: list[Callable[[dict[str, Tensor]], Tensor]] = [
    lambda outputs: outputs["out"].square().mean(),
    lambda outputs: outputs["out"].sum() + outputs["hidden"].square().sum(),
    lambda outputs: outputs["hidden"].sum(),  # without the heads
    lambda outputs: outputs["out"][0, 0] * 2,
]


LARGE = 1e6  # a gradient with which a program ends

# What programs do, and how often.
WEIGHTS = {
    "train": 6.0,
    "step": 5.0,
    "train_in_a_window": 3.0,
    "zero": 3.0,
    "freeze_or_unfreeze": 2.0,
    "hook_or_unhook": 1.0,
    "edit_a_gradient": 1.0,
    "change_a_buffer_in_place": 1.0,
    "move_parameters": 1.0,
    "clip": 1.0,
    "train_locally": 1.0,
    "train_with_a_penalty": 1.0,
    "train_with_weights_in_the_loss": 1.0,
    "evaluate": 1.0,
    "evaluate_on_one_rank": 1.0,
    "run_a_forward_alone": 1.0,
    "ask_for_an_input_gradient": 1.0,
    "load": 1.0,
    "load_the_optimizer": 0.5,
    "reset_states": 0.7,
    "go_on_with_a_copy": 1.0,
    "fail_in_a_forward": 1.0,
    "fail_in_a_backward": 0.7,
    "grow": 0.7,
}


class Program:
    """One program. What it does is the same on all ranks; batches, and sometimes the branches in use, are not.

    Args:
        rank, size: of this process and the default group.
        seed: of all choices.
        sharded: whether a `ShardedOptimizer` steps. Then weights are compared, and no gradients.

    Attributes:
        log: what it is and what it has done, in words.
    """

    weights: ClassVar[Mapping[str, float]] = WEIGHTS
    possible: ClassVar[Sequence[dict[str, Any]]] = OPTIONS
    tolerance: ClassVar[float] = 1e-8  # of gradients and buffers

    def __init__(self, rank: int, size: int, seed: int, *, sharded: bool) -> None:
        self.rank, self.size, self.sharded = rank, size, sharded
        self.log: list[str] = []
        self._shared, self._own = random.Random(seed), random.Random(1000 * seed + rank)
        self._batches = torch.Generator().manual_seed(77 * seed + rank)
        torch.manual_seed(seed)
        self.net, self.plain = self._nets()
        self._wrap()
        self._accumulated: set[str] = set()  # names of parameters with gradients that were not averaged
        self._owes = False  # whether a forward that synchronises has had no backward
        self._used_up = False  # whether a sharded optimizer holds what `.grad` was
        self._broken = False  # whether the last backward raised
        self._hooks: list[RemovableHandle] = []  # of the program, on parameters of both modules
        self._buffers_agree = False  # whether buffers were sent and not changed since
        self._make_optimizers()

    def run(self, length: int) -> None:
        """Do so many things, unless training runs away, and compare after each; raises AssertionError on every rank."""
        names, weights = list(self.weights), list(self.weights.values())
        for number in range(length):
            name = self._shared.choices(names, weights)[0]
            self.log.append(f"{number}: {name}")
            agree_on(what_is_wrong(partial(self._do, name)))
            if self._has_run_away():
                return
            agree_on(self._difference(waiting=self._any_accumulated()))

    def _do(self, name: str) -> str:
        self.log[-1] += f" {getattr(self, name)() or ''}"
        return ""

    # --- What it is made of; in a mesh, other parts ---

    def _nets(self) -> tuple[Net, Net]:
        """Return two equal modules."""
        net = Net(self._shared)
        return net, copy.deepcopy(net)

    def _divide(self, branch: nn.Module) -> None:
        """Divide a branch of the module that is wrapped."""

    def _ranks(self, face: str) -> dict[str, Any]:
        """Return the arguments that tell a wrapper its ranks."""
        return {}

    def _pair(self, ours: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this rank has of a tensor of the wrapped module, and the same part of a plain one."""
        return ours, plain

    def _move(self, param: nn.Parameter, *, turns: bool) -> None:
        """Give a parameter new memory, perhaps in another order."""
        param.data = param.data.t().clone().t() if turns and param.dim() == 2 else param.data.clone()

    def _wrap(self) -> None:
        shared = self._shared
        face = shared.choice(["DataParallel", "DataParallel", "DistributedDataParallel", "replicate"])
        possible = self.possible[:-WITH_WHOLE_GRADIENTS] if self.sharded else self.possible
        chosen: dict[str, Any] = {}
        for _ in range(shared.randint(0, 3)):
            chosen |= shared.choice(possible)
        self.options = {key: value for key, value in chosen.items() if key not in ("small", "buffers", "views")}
        self._sends_buffers = "buffers" in chosen
        if face == "DataParallel":
            self.options["broadcast_buffers"] = self._sends_buffers
            if "small" in chosen:
                self.options |= {"comm_buffer_size": 3e-4, "last_comm_buffer_size": 1e-4}
            self.call = self.model = dpfuse.DataParallel(self.net, **self._ranks(face), **self.options)
        else:
            self.options |= {
                "forward_sync_buffers": self._sends_buffers,
                "gradient_as_bucket_view": "views" not in chosen,
            }
            if "small" in chosen:
                self.options["bucket_cap_mb"] = 3e-4
            if face == "replicate":
                self.call = dpfuse.replicate(self.net, **self._ranks(face), **self.options)
                self.model = self.call.replicated_by
            else:
                self.call = self.model = dpfuse.DistributedDataParallel(self.net, **self._ranks(face), **self.options)
        self.log.append(f"{face} {self.options}\n{self.net}")

    def _make_optimizers(self) -> None:
        kind, settings = self._shared.choice(OPTIMIZERS)
        ours: torch.optim.Optimizer
        if self.sharded:
            ours = dpfuse.ShardedOptimizer(self.model, kind, **settings)
        else:
            ours = kind(self.net.parameters(), **settings)
        self._optimizers = [ours, kind(self.plain.parameters(), **settings)]
        self.log.append(f"{ours}")

    def _triples(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        named = zip(self.net.named_parameters(), self.plain.parameters(), strict=True)
        return [(name, ours, plain) for (name, ours), plain in named]

    def _batch(self) -> Tensor:
        return torch.randn(self._shared.choice([2, 3, 6]), 4, generator=self._batches, dtype=torch.float64)

    def _branches(self, *, same: bool) -> tuple[int, ...]:
        chance = self._shared if same else self._own
        return tuple(index for index in range(len(self.net.branches)) if chance.random() < 0.7)

    def _any_accumulated(self) -> bool:
        found = torch.tensor(float(len(self._accumulated)))
        dist.all_reduce(found)
        return bool(found)

    def _on_both(self, act: Callable[[Any, Any], object]) -> None:
        for module, optimizer in zip((self.net, self.plain), self._optimizers, strict=True):
            act(module, optimizer)

    # --- The rule, by hand ---

    def _plain_backward(self, loss: Tensor, *, twice: bool = False) -> None:
        params = dict(self.plain.named_parameters())
        before = gradients_of(params)
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        self._accumulated |= changed(params, before)

    def _average(self) -> None:
        average(dict(self.plain.named_parameters()), self._accumulated)
        self._accumulated.clear()
        self._owes = self._broken = False
        self._used_up = self.sharded
        if self._sends_buffers:
            lengths: list[int] = [0] * dist.get_world_size()
            dist.all_gather_object(lengths, self.plain.observer.seen.numel())
            for name, buffer in self.plain.named_buffers():
                if name != "observer.seen" or len(set(lengths)) == 1:
                    dist.broadcast(buffer, 0)
            self._buffers_agree = True

    def _close(self, ours: Tensor, plain: Tensor, times: float = 1) -> bool:
        return torch.allclose(ours, plain, rtol=times * self.tolerance, atol=times * self.tolerance)

    def _has_run_away(self) -> bool:
        """Whether some gradient is so large that its rounding errors are, too."""
        grads = [plain.grad for *_, plain in self._triples() if plain.grad is not None]
        found = torch.tensor(max([0.0, *(grad.abs().max().item() for grad in grads)]))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return not found < LARGE

    def _difference(self, *, waiting: bool) -> str:
        """Compare the two modules, and return how they differ; `waiting` tells that some gradients are not averaged."""
        for name, ours, plain in self._triples():
            here, there = self._pair(ours, plain)
            if not self._close(here, there, 10):
                return f"weight {name} differs by {(here - there).abs().max()}"
            if self.sharded or (waiting and "accumulate_in_buckets" in self.options):
                continue
            grads = (torch.zeros_like(each) if each.grad is None else each.grad for each in (ours, plain))
            here, there = self._pair(*grads)
            if not self._close(here, there):
                return f"gradient of {name} differs by {(here - there).abs().max()}"
        agree, self._buffers_agree = self._buffers_agree, False
        if self.rank == 0 or agree or not self._sends_buffers:
            for (name, here), there in zip(self.net.named_buffers(), self.plain.buffers(), strict=True):
                if not self._close(here, there):
                    return f"buffer {name} differs: {here} and {there}"
        return ""

    # --- What it does ---

    def _backward(self, *, sync: bool = True) -> str:
        shared = self._shared
        self._zero_if_used_up()
        same, forwards = shared.random() < 0.6, shared.choice([1, 1, 1, 2])
        recompute, loss_of = shared.choice(["", "", "reentrant", "newer"]), shared.choice([LOSSES[0], *LOSSES])
        if recompute and "find_unused_parameters" in self.options:
            recompute = "newer"  # the other kind is refused there
        if recompute == "reentrant":  # a second use makes more marks in a backward, which is refused
            forwards = 1
        twice = shared.random() < 0.15 and not (self._owes or self.sharded or recompute == "reentrant")
        # A hook halves the mean of the first one only on ranks that use the parameter in the second one, too.
        twice = twice and isinstance(self.net.norm, nn.LayerNorm) and not self._hooks
        uses = [self._branches(same=same) for _ in range(forwards)]
        batches = [self._batch().requires_grad_(recompute == "reentrant") for _ in range(forwards)]

        def loss(call: Callable[..., dict[str, Tensor]]) -> Tensor:
            losses = [loss_of(call(x, use, recompute)) for x, use in zip(batches, uses, strict=True)]
            return torch.stack(losses).sum()

        plain = loss(self.plain)
        if plain.requires_grad:
            self._plain_backward(plain, twice=twice)
            with nullcontext() if sync else self.model.no_sync():
                ours = loss(self.call)
                if twice:
                    ours.backward(retain_graph=True)
                ours.backward()
            if sync or self._owes:
                self._average()
        return (
            f"{forwards} forwards, branches {uses}, {recompute}, {'' if sync else 'local'} {'twice' if twice else ''}"
        )

    def train(self) -> str:
        return self._backward()

    def train_locally(self) -> str:
        return self._backward(sync=False)

    def train_in_a_window(self) -> str:
        return "; ".join([*(self._backward(sync=False) for _ in range(self._shared.randint(1, 3))), self._backward()])

    def step(self) -> str:
        if self._broken or self._any_accumulated():  # else it would be a wrong program
            return "not now"
        self._on_both(lambda module, optimizer: optimizer.step())
        return ""

    def zero(self, *, to_none: bool = False) -> None:
        self._used_up = False
        if "accumulate_in_buckets" in self.options:
            self.model.discard_accumulated()
        # A window in the buckets has no gradients that could become zeros: what is dropped is None.
        to_none |= self.sharded or "accumulate_in_buckets" in self.options or self._shared.random() < 0.5
        self._on_both(lambda module, optimizer: optimizer.zero_grad(set_to_none=to_none))
        self._accumulated.clear()

    def _zero_if_used_up(self) -> None:
        if self._used_up:
            self.zero()

    def evaluate(self) -> None:
        x, use = self._batch(), self._branches(same=False)
        for module in (self.model, self.call, self.plain):
            module.eval()
        with torch.set_grad_enabled(self._shared.random() < 0.4):
            self.call(x, use)
            self.plain(x, use)
        for module in (self.model, self.call, self.plain):
            module.train()

    def evaluate_on_one_rank(self) -> None:
        if self.rank == self._shared.randrange(self.size):
            self.model.eval()
            with torch.no_grad():
                self.call(torch.ones(2, 4, dtype=torch.float64), (0,))
            self.model.train()

    def run_a_forward_alone(self) -> None:
        x, use = self._batch(), self._branches(same=True)
        self.call(x, use)
        self.plain(x, use)
        self._owes = True

    def ask_for_an_input_gradient(self) -> None:
        x, use = self._batch().requires_grad_(), self._branches(same=True)
        found = [torch.autograd.grad(call(x, use)["out"].sum(), x)[0] for call in (self.call, self.plain)]
        assert self._close(*found), f"the gradients of the input are {found}"
        self._owes = True

    def freeze_or_unfreeze(self) -> str:
        names = [name for name, *_ in self._triples() if name != "stem.weight"]  # one parameter trains
        chosen = self._shared.sample(names, min(len(names), self._shared.randint(1, 4)))
        trains = self._shared.random() < 0.5
        for name, ours, plain in self._triples():
            if name in chosen:
                ours.requires_grad_(trains)
                plain.requires_grad_(trains)
        return f"{'un' * trains}freezes {chosen}"

    def hook_or_unhook(self) -> str:
        """Put hooks on parameters, which halve what was accumulated; or remove those that are there."""
        names = [name for name, *_ in self._triples()]
        chosen = self._shared.sample(names, min(len(names), self._shared.randint(1, 3)))
        # A window in the buckets has no gradient from before that a hook could get.
        if self._hooks or self._any_accumulated() or "accumulate_in_buckets" in self.options:
            self._unhook()
            return "unhooks"
        for module in (self.net, self.plain):
            for name in chosen:
                if (param := module.get_parameter(name)).requires_grad:
                    self._hooks.append(param.register_post_accumulate_grad_hook(_halve))
        return f"hooks {chosen}"

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def edit_a_gradient(self) -> str:
        names = [name for name, *_ in self._triples()]
        how = self._shared.choice(["remove", "multiply", "copy", "move"])
        name = self._shared.choice(names)
        if self.sharded or self._any_accumulated():
            return "not now"
        for module in (self.net, self.plain):
            param = module.get_parameter(name)
            if param.grad is None:
                continue
            if how == "remove":
                param.grad = None
            elif how == "multiply":
                param.grad.mul_(0.5)
            elif how == "copy":
                param.grad = param.grad.clone()
            else:
                param.grad.data = param.grad.data.clone()
        return f"{how} {name}"

    def reset_states(self) -> str:
        ours, plain = self._optimizers
        triples = [triple for triple in self._triples() if self._shared.random() < 0.4]
        how = self._shared.choice(list(RESETS))
        if isinstance(plain, torch.optim.Adagrad):
            return "not now"  # it makes its states when it is made, and steps with nothing else
        for name, here, there in self._triples():
            stated = here in ours.state if self.sharded else bool(ours.state.get(here))
            assert stated == bool(plain.state.get(there)), f"only one optimizer has a state of {name}"
        RESETS[how](ours, [each for _, each, _ in triples])
        RESETS[how](plain, [each for *_, each in triples])
        return f"{how} of {[name for name, *_ in triples]}"

    def change_a_buffer_in_place(self) -> str:
        """No other rank gets a length that rank 0 had: in the first step with other lengths, it would get values."""
        shared = self._shared
        how, where = shared.choice(list(IN_PLACE)), shared.choice(["everywhere", "not on rank 0", "apart"])
        lengths = {"everywhere": shared.randint(0, 6), "not on rank 0": 20 + shared.randint(0, 6)}
        length = lengths.get(where, 10 + 3 * self.rank)
        if where == "not on rank 0" and self.rank == 0:
            return f"{how} on the others"
        for module in (self.net, self.plain):
            IN_PLACE[how](module.observer.seen, length)
            module.observer.seen.fill_(0.5)
        return f"{how} {where} to {length}"

    def move_parameters(self) -> str:
        """On some ranks, to new memory; or on all ranks, to another order in memory."""
        shared = self._shared
        names = [name for name, *_ in self._triples()]
        chosen, turns = shared.sample(names, min(len(names), 3)), shared.random() < 0.3
        if turns and self._any_accumulated():
            return "not now"
        if turns or self.rank == shared.randrange(self.size):
            for name in chosen:
                for module in (self.net, self.plain):
                    self._move(module.get_parameter(name), turns=turns)
        return f"{'turns' if turns else 'moves'} {chosen}"

    def clip(self) -> str:
        if self._broken or self._any_accumulated() or (self.sharded and not self._used_up):
            return "not now"
        theirs = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.1)
        ours = self.model.clip_grad_norm_(0.1)
        assert self._close(ours, theirs), f"the norms are {ours} and {theirs}"
        return f"norm {theirs:.3g}"

    def load(self) -> None:
        def act(module: Net, optimizer: torch.optim.Optimizer) -> None:
            state = module.state_dict().items()
            module.load_state_dict(
                {key: value * 0.9 if value.is_floating_point() else value.clone() for key, value in state}
            )

        self._on_both(act)

    def load_the_optimizer(self) -> None:
        self._on_both(lambda module, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))

    def go_on_with_a_copy(self) -> str:
        if self.sharded or self.call is not self.model or self._any_accumulated():
            return "not now"
        self._unhook()  # a copy has none
        self.call = self.model = copy.deepcopy(self.model)
        self.net = self.model.module
        self._owes = False
        for _, ours, plain in self._triples():
            plain.grad = None if ours.grad is None else plain.grad
        self._make_optimizers()
        return ""

    def fail_in_a_forward(self) -> None:
        x = self._batch()
        for call in (self.call, self.plain):
            try:
                call(x, (), "", "forward")
            except PlannedError:
                continue
            raise AssertionError("nothing was raised")

    def fail_in_a_backward(self) -> str:
        if self._any_accumulated():
            return "not now"
        self._zero_if_used_up()
        x = self._batch()
        try:
            self.call(x, (), "", "backward")["out"].sum().backward()
        except PlannedError:
            self.plain(x)  # changes the buffers
            self._broken, self._owes = True, False
            # What was sent may still land in gradients that are zeroed in place, and only ours has some now.
            self.zero(to_none=True)
            return ""
        raise AssertionError("nothing was raised")

    def train_with_a_penalty(self) -> str:
        if not isinstance(self.net.norm, nn.LayerNorm):
            return "not now"
        self._zero_if_used_up()
        x, use = self._batch().requires_grad_(), self._branches(same=True)

        def loss(call: Callable[..., dict[str, Tensor]]) -> Tensor:
            out = call(x, use)["out"].sum()
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            return out * 0.1 + grad.square().sum()

        self._plain_backward(loss(self.plain))
        loss(self.call).backward()
        self._average()
        return ""

    def train_with_weights_in_the_loss(self) -> None:
        self._zero_if_used_up()
        x, use = self._batch(), self._branches(same=True)

        def loss(call: Callable[..., dict[str, Tensor]], module: Net) -> Tensor:
            return call(x, use)["out"].sum() * module.scale + 0.01 * module.stem.weight.square().sum()

        self._plain_backward(loss(self.plain, self.plain))
        loss(self.call, self.net).backward()
        self._average()

    def grow(self) -> str:
        if self._any_accumulated():
            return "not now"
        new = self.net.branch(4)
        for tensor in new.parameters():  # the same on all ranks
            nn.init.uniform_(tensor, generator=torch.Generator().manual_seed(self._shared.randrange(10**6)))

        def act(module: Net, optimizer: torch.optim.Optimizer) -> None:
            branch = copy.deepcopy(new)
            if module is self.net:
                self._divide(branch)
            module.branches.append(branch)
            optimizer.add_param_group({"params": list(branch.parameters())})

        self._on_both(act)
        return ""


def run(seeds: Sequence[int], make: Callable[[int], Any], length: int = 14) -> None:
    """Run one program for each seed; raises AssertionError, with what the first wrong program has done.

    Args:
        seeds: of the programs.
        make: makes the program of a seed.
        length: how many things each does.
    """
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in (dpfuse.LoopWarning, dpfuse.WeightsWarning):  # the programs are right
                warnings.simplefilter("error", kind)
            program = make(seed)
            try:
                program.run(length)
            except AssertionError as error:
                raise AssertionError("\n".join([f"seed {seed}", *program.log, str(error)])) from None
