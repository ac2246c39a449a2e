"""Python imports this file when it starts, as its folder is in PYTHONPATH. Imports the standard library only.

At its end `import torch` calls all entry points of the group `torch.backends` that installed packages have. This file
adds one, which calls `start()` of the module that the variable DPFUSE_STARTUP names. A process that never imports torch
pays for nothing. The file removes its folder from `sys.path`, and runs the `sitecustomize` that Python would have found
without it.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys

TYPE_CHECKING = False  # `typing` and `importlib.metadata` take longer to import than Python to start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.metadata import Distribution, DistributionFinder
    from pathlib import Path

__all__: list[str] = []

FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(FOLDER)
CLASS_MODULE = "torch.nn.parallel.distributed"
METADATA = "Name: dpfuse-startup\nVersion: 0\n"


class _Finder:
    """Tells `importlib.metadata`, which asks the finders of modules, of one more installed package.

    Args:
        module: has the function `start`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._started = False
        atexit.register(self._ended)

    def find_spec(self, *names: object) -> None:
        """Find no module."""

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        if context.name is not None or context.path is not sys.path:  # one package, or those of one folder
            return
        from importlib.metadata import Distribution, EntryPoint

        start = self.start

        class Start(EntryPoint):
            def load(self) -> Callable[[], None]:
                return start

        class Startup(Distribution):
            name = "dpfuse-startup"
            entry_points = (Start("dpfuse", "dpfuse.startup", "torch.backends"),)  # type: ignore[assignment]

            def read_text(self, filename: str) -> str | None:
                return METADATA if filename == "METADATA" else None

            def locate_file(self, path: str | os.PathLike[str]) -> Path:
                raise NotImplementedError("dpfuse-startup has no files")

        yield Startup()

    def start(self) -> None:
        """Call `start()` of the module, unless that was done, as where a program reloads torch."""
        if self._started:
            return
        if importlib.util.find_spec("dpfuse") is None:  # it was found in the folder where the command was run
            root = os.path.dirname(PACKAGE)
            sys.path += [root, os.path.join(root, "kernels")]
        importlib.import_module(self._module).start()
        self._started = True

    def _ended(self) -> None:
        if not self._started and CLASS_MODULE in sys.modules and os.environ.get("RANK", "0") == "0":
            print(
                "dpfuse: `import torch` has not called its extensions, so each DistributedDataParallel of this process "
                "is torch's. Remove TORCH_DEVICE_BACKEND_AUTOLOAD=0, or call dpfuse.patch() after `import torch`",
                file=sys.stderr,
                flush=True,
            )


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
        _finder = _Finder(os.environ["DPFUSE_STARTUP"])
        sys.meta_path.append(_finder)
        if "torch" in sys.modules:  # a .pth file has imported it
            _finder.start()
    _run_the_next_one()
