"""Python imports this file when it starts, as its folder is in PYTHONPATH. Imports the standard library only.

It calls `start()` of the module that the variable DPFUSE_STARTUP names, once torch has been executed. A process that
never imports torch pays for nothing. The file removes its folder from `sys.path`, and runs the `sitecustomize` that
Python would have found without it. Source: the way in which coverage and ddtrace reach the processes that a program
starts.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import sys

TYPE_CHECKING = False  # `typing` and `importlib.abc` take longer to import than Python to start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__: list[str] = []

FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(FOLDER)
WATCHED = "torch"
CLASS_MODULE, CLASS = "torch.nn.parallel.distributed", "DistributedDataParallel"
# Python leaves frames of this file out of tracebacks of imports, and of the places of warnings.
IMPORT_SYSTEM = "<frozen importlib._bootstrap_external>"


class _AfterTorch:
    """Finds torch as Python does, and has the loader call back once it has executed torch.

    Libraries look for torch before they import it, and each loader that they get may be the one that executes it. So
    the finder stays. Torch may also be executed by a loader that another finder has made, or the program itself. Then
    the first wrapper that is made calls back.

    Args:
        module: has the function `start`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._started = False
        self._class: Any = None  # torch's, as it was first executed
        self._watching: dict[type, Any] = {}  # classes of loaders that call back, by the loaders' own
        atexit.register(self._ended)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in (WATCHED, CLASS_MODULE) or (name == WATCHED and self._started) or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def start(self) -> None:
        """Call `start()` of the module, unless that was done."""
        if self._started:
            return
        if importlib.util.find_spec("dpfuse") is None:  # it was found in the folder where the command was run
            root = os.path.dirname(PACKAGE)
            sys.path += [root, os.path.join(root, "kernels")]
        importlib.import_module(self._module).start()
        self._started = True
        self._class = getattr(sys.modules.get(CLASS_MODULE), CLASS, None)

    def _watch(self, loader: Any) -> None:
        """Let a loader call back. Only its type tells: `__class__`, attributes, equality and pickles are as before."""
        plain = type(loader)
        if plain in self._watching.values() or not hasattr(plain, "exec_module"):
            return  # the same loader was found before, or it cannot call back: `_ended` says what follows
        try:
            if plain not in self._watching:
                self._watching[plain] = self._class_that_calls_back(plain)
            _set_class(loader, self._watching[plain])
        except TypeError:  # a class of C
            return
        if getattr(loader.exec_module, "__func__", None) is not self._watching[plain].exec_module:
            _set_class(loader, plain)  # the loader has a function of its own, which does not call back

    def _class_that_calls_back(self, plain: Any) -> type:
        def execute(loader: Any, module: ModuleType) -> None:
            plain.exec_module(loader, module)
            _set_class(loader, plain)
            self._executed(module)

        def reduce(loader: Any, protocol: Any) -> Any:
            watching = type(loader)
            _set_class(loader, plain)
            try:
                return loader.__reduce_ex__(protocol)
            finally:
                _set_class(loader, watching)

        execute.__code__ = execute.__code__.replace(co_filename=IMPORT_SYSTEM)
        functools.update_wrapper(execute, plain.exec_module)
        own = {"__class__": property(lambda loader: plain), "__reduce_ex__": reduce, "exec_module": execute}
        names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
        return type(plain.__name__, (plain,), {**names, **own, "__slots__": ()})

    def _executed(self, module: ModuleType) -> None:
        if module.__name__ == WATCHED:
            self.start()
        elif self._started and self._class is not None:
            setattr(module, CLASS, self._class)  # it was reloaded; the class that torch had first is the one that acts
        else:
            self._class = getattr(module, CLASS)
            loader = getattr(getattr(sys.modules.get(WATCHED), "__spec__", None), "loader", None)
            if type(loader) not in self._watching.values():
                self._start_when_made(self._class)

    def _start_when_made(self, kind: Any) -> None:
        """Start when the first wrapper is made, as no loader calls back when torch has been executed."""
        plain = kind.__init__

        @functools.wraps(plain)
        def construct(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if self._started or caller.startswith("torch.distributed."):  # which makes wrappers for itself
                plain(wrapper, *args, **kwargs)
                return
            if kind.__init__ is construct:
                kind.__init__ = plain
            self.start()
            kind.__init__(wrapper, *args, **kwargs)

        kind.__init__ = construct

    def _ended(self) -> None:
        unseen = not self._started and self._class is None and {WATCHED, CLASS_MODULE} <= {*sys.modules}
        if unseen and os.environ.get("RANK", "0") == "0":
            print(
                "dpfuse: torch was imported in a way that dpfuse cannot see, so each DistributedDataParallel of this "
                "process is torch's. Call dpfuse.patch() in the program, after `import torch`",
                file=sys.stderr,
                flush=True,
            )


def _set_class(loader: Any, kind: type) -> None:
    vars(object)["__class__"].__set__(loader, kind)  # past the property of a class that calls back


def _run_the_next_one() -> None:
    """Import the `sitecustomize` after this one, if there is one."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != FOLDER or not folder]
    own = sys.modules.pop("sitecustomize", None)
    spec = importlib.util.find_spec("sitecustomize")
    if spec is not None:
        importlib.import_module("sitecustomize")
    elif own is not None:
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":  # and not imported as a part of dpfuse
    if os.environ.get("DPFUSE_STARTUP"):
        _finder = _AfterTorch(os.environ["DPFUSE_STARTUP"])
        sys.meta_path.insert(0, _finder)
        if WATCHED in sys.modules:  # a .pth file has imported it
            _finder.start()
    _run_the_next_one()
