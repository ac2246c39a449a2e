"""Programs that load state dicts into modules whose children have other names than before, or the name `module`.

All layers have the same shapes, so that a value could go to another parameter. Each value must be where its name says.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from tests.random_programs.agreement import agree_on, what_is_wrong

__all__ = ["RenamedChildren"]

NAMES = ["module", "module", "_orig_mod", "encoder", "layers", "0"]
OLD = "old_"  # in front of the old name of a child
LENGTH = 5  # loads of a program


class Tree(nn.Module):
    """Layers of two numbers, under random names, and perhaps a weight of its own.

    Args:
        shared: random numbers, which choose the names.
        depth: of children below.
        renamed: whether a load hook gives some children their names.
    """

    def __init__(self, shared: random.Random, depth: int = 2, *, renamed: bool = False) -> None:
        super().__init__()
        names = dict.fromkeys(shared.choices(NAMES, k=shared.randint(1, 3)))
        for name in names:
            if depth and shared.random() < 0.5:
                child: nn.Module = Tree(shared, depth - 1)
            else:
                child = nn.Linear(2, 2, bias=shared.random() < 0.6) if shared.random() < 0.8 else nn.BatchNorm1d(2)
            self.add_module(name, child)
        if shared.random() < 0.5:
            self.weight = nn.Parameter(torch.empty(2, 2))
        self.old = [name for name in names if renamed and shared.random() < 0.7]
        if self.old:
            self.register_load_state_dict_pre_hook(_rename)

    def old_name(self, key: str) -> str:
        """Return the name that this entry of the state dict once had."""
        first = key.partition(".")[0]
        return OLD + key if first in self.old else key


def _rename(tree: Tree, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in tree.old:
        old = f"{prefix}{OLD}{name}."
        for key in [each for each in state if each.startswith(old)]:
            state[f"{prefix}{name}.{key.removeprefix(old)}"] = state.pop(key)


class RenamedChildren:
    """One program. What it does is the same on all ranks.

    Args:
        rank, size: of this process and the default group.
        seed: of all choices.

    Attributes:
        log: what it is and what it has done, in words.
    """

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank = rank
        self.log: list[str] = []
        self._seed, self._shared = seed, random.Random(seed)
        self._renamed = self._shared.random() < 0.4

    def run(self, length: int) -> None:
        """Load; raises AssertionError on every rank. `length` is for shorter things, and makes no difference."""
        for number in range(LENGTH):
            self.log.append(f"{number}:")
            load = self._shared.choice([self._whole, self._whole, self._part, self._checkpoint])
            agree_on(what_is_wrong(load))

    def _tree(self, value: float) -> Tree:
        """Return the module of this program; each entry has values of its own, from `value` on."""
        tree = Tree(random.Random(self._seed), renamed=self._renamed)
        with torch.no_grad():
            for number, entry in enumerate(tree.state_dict().values()):
                entry.fill_(value + number)
        return tree

    def _wrapped(self, tree: nn.Module) -> tuple[str, Any]:
        face = self._shared.choice(["DataParallel", "DistributedDataParallel"])
        self.log[-1] += f" {face}"
        return face, getattr(dpfuse, face)(tree)

    def _old(self, tree: Tree, prefix: str) -> dict[str, Tensor]:
        old = self._shared.random() < 0.7
        state = {key: value.clone() for key, value in tree.state_dict().items()}
        return {prefix + (tree.old_name(key) if old else key): value for key, value in state.items()}

    def _whole(self) -> str:
        """A whole state dict is loaded with the prefix of a wrapper or without, by either class."""
        source, target = self._tree(100), self._tree(500)
        state = self._old(source, self._shared.choice(["", "module."]))
        _, model = self._wrapped(target)
        lenient = self._shared.random() < 0.3
        self.log[-1] += f" {'strict=False' * lenient} {[*state]}"
        model.load_state_dict(state, strict=not lenient)
        return _difference(target, source.state_dict())

    def _part(self) -> str:
        """A part is loaded under the wrapper's own names. Where they are those of others, too, it may raise."""
        source, target = self._tree(100), self._tree(500)
        expected = {key: value.clone() for key, value in target.state_dict().items()}
        face, model = self._wrapped(target)
        prefix = "" if face == "DataParallel" else "module."
        state = source.state_dict()
        chosen = self._shared.sample([*state], self._shared.randint(1, len(state)))
        part = {prefix + key: state[key].clone() for key in chosen}
        self.log[-1] += f" part {[*part]}"
        others = [*part] if prefix else [key.removeprefix("module.") for key in part]  # of the other reading
        ambiguous = all(key in state for key in others) and (prefix or others != [*part])
        try:
            model.load_state_dict(part, strict=False)
        except Exception:
            if not ambiguous:
                raise
            self.log[-1] += " which is refused"
            return ""
        return _difference(target, {**expected, **{key: state[key] for key in chosen}})

    def _checkpoint(self) -> str:
        """A checkpoint of one construction is loaded into another one."""
        source, target = self._tree(100), self._tree(500)
        models = []
        for tree in (source, target):
            compiled = self._shared.choice(["", "", "inside", "outside"])
            model: Any = self._wrapped(torch.compile(tree) if compiled == "inside" else tree)[1]  # type: ignore[arg-type]
            models.append(torch.compile(model) if compiled == "outside" else model)
            self.log[-1] += f" {compiled}"
        paths = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(paths)
        path = Path(paths[0]) / "here"
        dpfuse.save_checkpoint(path, models[0], step=1)
        dpfuse.load_checkpoint(path, models[1])
        return _difference(target, source.state_dict())


def _difference(tree: nn.Module, expected: Mapping[str, Tensor]) -> str:
    for key, value in tree.state_dict().items():
        if not torch.equal(value, expected[key]):
            return f"{key} is {value.flatten()[:1].item()}, expected {expected[key].flatten()[:1].item()}"
    return ""
