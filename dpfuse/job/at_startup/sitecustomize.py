"""Python imports this file when it starts, as its folder is in PYTHONPATH. Imports the standard library only.

It calls `start()` of the module that the variable DPFUSE_STARTUP names, once torch is imported. A process that never
imports torch pays for nothing. The file removes its folder from `sys.path`, and runs the `sitecustomize` that Python
would have found without it. Source: the way in which coverage and ddtrace reach the processes that a program starts.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__: list[str] = []

FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(FOLDER))
WATCHED = "torch"


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python does, and adds a call behind its import.

    Args:
        module: has the function `start`.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WATCHED or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # torch may be found later, on a longer sys.path
            return None
        loader = spec.loader
        load = loader.exec_module

        def load_and_start(module: ModuleType) -> None:
            del loader.exec_module  # an attribute of this loader only: the class has its own
            load(module)
            self._start()

        loader.exec_module = load_and_start  # type: ignore[method-assign]
        return spec

    def _start(self) -> None:
        if importlib.util.find_spec("dpfuse") is None:  # it was found in the folder where the command was run
            root = os.path.dirname(PACKAGE)
            sys.path += [root, os.path.join(root, "kernels")]
        importlib.import_module(self._module).start()


def _run_the_next_one() -> None:
    """Import the `sitecustomize` behind this one, if there is one."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != FOLDER or not folder]
    own = sys.modules.pop("sitecustomize", None)
    spec = importlib.util.find_spec("sitecustomize")
    if spec is not None:
        importlib.import_module("sitecustomize")
    elif own is not None:
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":  # and not imported as a part of dpfuse
    if os.environ.get("DPFUSE_STARTUP"):
        sys.meta_path.insert(0, _AfterTorch(os.environ["DPFUSE_STARTUP"]))
    _run_the_next_one()
