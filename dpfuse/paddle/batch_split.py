"""Splits the items of a batch into inputs of the network and labels of the loss. Touches no data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._pytree import tree_leaves

from dpfuse.paddle.meters import as_list
from dpfuse.paddle.static.input_spec import InputSpec

__all__ = ["BatchSplit"]

Spec = InputSpec | str


class BatchSplit:
    """Decides which items of a batch are inputs of the network and which are labels.

    Args:
        inputs, labels: specs or names, in the order of the arguments of the network and the loss; a dict of specs by
            name; None.
        forward: the network's; its signature tells how many inputs it takes.
    """

    def __init__(self, inputs: Any, labels: Any, forward: Callable[..., Any]) -> None:
        self.inputs = _specs(inputs, "inputs")
        self.labels = _specs(labels, "labels")
        self._seen: int | None = None  # inputs in the last batch with labels
        try:
            arguments = inspect.signature(forward).parameters.values()
        except (TypeError, ValueError):  # a compiled function may have no signature
            self._least, self._most = 0, float("inf")
            return
        positional = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
        self._least = sum(a.default is a.empty for a in positional)
        self._most = float("inf") if any(a.kind is a.VAR_POSITIONAL for a in arguments) else len(positional)

    def __call__(self, batch: Any, labelled: bool) -> tuple[list[Any], list[Any]]:
        """Return (inputs, labels) of one batch.

        Args:
            batch: a tensor, a list or tuple of tensors (nested ones are flattened), or a dict with the names as keys.
            labelled: False for prediction, where labels may be missing and are dropped.

        Raises:
            TypeError: An item is text. A batch of texts looks like several items.
            ValueError: Inputs and labels cannot be told apart, or items are missing.
        """
        if isinstance(batch, Mapping):
            wanted = [*self.inputs, *(self.labels if labelled else [])]
            names = [spec if isinstance(spec, str) else spec.name for spec in wanted]
            if not self.inputs or not all(name in batch for name in names):
                raise ValueError(
                    f"the batch is a dict with the keys {list(batch)}, but Model's inputs and labels name {names}; "
                    "expected names that are keys. Pass Model(network, inputs=['…'], labels=['…'])."
                )
            items, count = [batch[name] for name in names], len(self.inputs)
        else:
            items = tree_leaves(batch, is_leaf=lambda item: not isinstance(item, (list, tuple)))
            text = next((item for item in items if isinstance(item, (str, bytes))), None) if labelled else None
            if text is not None:
                raise TypeError(
                    f"a batch holds text, such as {text!r}; expected tensors, arrays or numbers. Leave it out of the "
                    "dataset's samples, or make them dicts and name what is used: Model(network, inputs=['x', …], "
                    "labels=['y', …])."
                )
            count = self._count(len(items), labelled)
            self._seen = count if labelled else self._seen
        return items[:count], items[count:] if labelled else []

    def _count(self, items: int, labelled: bool) -> int:
        wanted = len(self.inputs) + (len(self.labels) if labelled else 0)
        if items < max(wanted, 1) or (labelled and self.inputs and self.labels and items != wanted):
            raise ValueError(
                f"a batch has {items} item(s), but Model was given {len(self.inputs)} inputs and {len(self.labels)} "
                "labels; expected one item for each"
            )
        if self.inputs:
            return len(self.inputs)
        if labelled and self.labels:
            return items - len(self.labels)
        if not labelled and self._seen is not None and items >= self._seen:
            return self._seen
        last_is_label = max(items - 1, 1)
        if labelled and self._least <= last_is_label <= self._most:
            return last_is_label
        if items <= self._least or (items == 1 and not labelled):
            return items
        if self._least == self._most:
            return self._least
        raise ValueError(
            f"a batch has {items} items, and the network takes {self._least} to {self._most} inputs, so it is not "
            "known which items are inputs. Name them: Model(network, inputs=['x', …], labels=['y', …])."
        )


def _specs(given: Any, name: str) -> list[Spec]:
    if isinstance(given, Mapping):
        named = given.items()
        given = [InputSpec(spec.shape, spec.dtype, key) if isinstance(spec, InputSpec) else spec for key, spec in named]
    specs = as_list(given)
    for spec in specs:
        if not isinstance(spec, (InputSpec, str)):
            raise TypeError(f"{name} must be InputSpecs or names, or a list of them, got {spec!r}")
    return specs
