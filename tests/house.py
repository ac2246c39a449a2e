"""No tests: the modules of the project, what each of them imports, and the picture of the house that follows from it.

`python -m tests.house` writes the picture into docs/design/architecture.md.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

__all__ = ["ENTRIES", "MODULES", "ROOT", "SOURCES", "floors", "imports_of", "layer_of", "module_of", "picture"]

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "dpfuse").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
ENTRIES = {"__main__", "launch", "distributed"}  # they only start something, or hand names on
PAGE = ROOT / "docs/design/architecture.md"
PICTURE = re.compile(r"(?<=```text\n)floor .*?(?=```)", re.DOTALL)


def module_of(path: Path) -> str:
    """Return the dotted name of a source."""
    root = ROOT / "kernels" if ROOT / "kernels" in path.parents else ROOT
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return the modules of the project that a module imports, anywhere in it, also for types alone."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in names}
    return frozenset(found & MODULES.keys()) - {module}


def layer_of(module: str) -> str:
    """Return the folder directly in dpfuse/ that a module lies in, or its own name; "kernels"; "dpfuse"."""
    parts = module.split(".")
    if parts[0] == "dpfuse_kernels":
        return "kernels"
    return parts[1] if len(parts) > 1 else "dpfuse"


@cache
def floors() -> dict[str, int]:
    """Return the floor of each layer: one above the highest of those that it imports."""
    below: dict[str, set[str]] = {layer_of(module): set() for module in MODULES}
    for module in MODULES:
        below[layer_of(module)] |= {layer_of(other) for other in imports_of(module)} - {layer_of(module)}

    @cache
    def floor(layer: str) -> int:
        return 1 + max(map(floor, below[layer]), default=0)

    return {layer: floor(layer) for layer in below if layer not in ENTRIES}


def picture() -> str:
    """Return a line for each layer, the highest floor first: its floor, its name, and what its docstring says first."""
    shown = [(number, layer) for layer, number in floors().items() if layer != "dpfuse"]
    lines = ["floor  layer               what it is"]
    last = 0
    for number, layer in sorted(shown, key=lambda each: (-each[0], each[1])):
        path = ROOT / "kernels/dpfuse_kernels" if layer == "kernels" else ROOT / "dpfuse" / layer
        source = (
            min(path.glob("*.py")) if path.is_dir() else path.with_suffix(".py")
        )  # `__init__.py` where there is one
        said = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n\n")[0]
        first = re.match(r".*?[.?](?=\s|$)", " ".join(said.split()))
        name = f"{layer}/" if path.is_dir() else f"{layer}.py"
        said = first[0].rstrip(".").replace("`", "") if first else said
        lines.append(f"{number if number != last else '':>5}  {name:<18}  {said}".rstrip())
        last = number
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(PICTURE.sub(lambda _: picture(), page), encoding="utf-8")
    print(picture())
