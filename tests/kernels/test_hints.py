"""What kernels tell the compiler about numbers is true wherever the compiler may use it.

Triton believes a hint at each use of the hinted number, also in a branch where it does not hold. A hint that a length
is a multiple of eight made sums on an H100 take in lanes behind a tensor. Neither the interpreter nor a count of wide
loads shows that. So a hint may only be given for a pointer that is made for it.
"""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels" / "dpfuse_kernels"
HINTS = {"multiple_of", "max_contiguous", "max_constancy", "assume"}


def shared_hints(source: str) -> list[str]:
    """The hints in `source` for what is not a pointer that is made in the same expression."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    hints = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in HINTS]
    return [text for hint in hints if "pointer_type" not in (text := ast.unparse(hint))]


def test_a_hint_for_a_number_is_found():
    pointer = "p = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)\n"
    assert shared_hints(pointer + "n = tl.multiple_of(length, 8)") == ["tl.multiple_of(length, 8)"]


def test_kernels_give_hints_for_pointers_only():
    sources = [path.read_text() for path in KERNELS.glob("*.py")]
    assert sum(source.count("multiple_of(") for source in sources) > 10
    assert [hint for source in sources for hint in shared_hints(source)] == []
