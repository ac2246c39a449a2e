"""Follows numbers through PTX, to find out which of them reach an address in global memory."""

from __future__ import annotations

import re

__all__ = ["narrow_products_in_addresses"]

INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z]\S*)\s+(%[a-z]+\d+)\s*,(.*);", re.MULTILINE)
REGISTER = re.compile(r"%[a-z]+\d+")
NARROW_PRODUCT = re.compile(r"(?:mul|mad)\.lo\.[su](?:16|32)\b")


def narrow_products_in_addresses(ptx: str) -> list[str]:
    """Return the products of 16 or 32 bits whose result, or a number made from it, gets 64 bits.

    Addresses in global memory have 64 bits, those in shared memory 32. So a product that stays in 32 bits is harmless,
    and one that is widened may have overflowed before.
    """
    origin: dict[str, str] = {}
    found: set[str] = set()
    changed = True
    while changed:  # a loop in the program may carry a number back to an earlier line
        changed = False
        for match in INSTRUCTION.finditer(ptx):
            operation, target, sources = match.groups()
            made = match[0].strip().rstrip(";") if NARROW_PRODUCT.match(operation) else None
            made = made or next((origin[name] for name in REGISTER.findall(sources) if name in origin), None)
            if made is None or operation.startswith(("setp", "ld.")):
                continue
            if target.startswith("%rd"):
                found.add(made)
            elif target not in origin:
                origin[target] = made
                changed = True
    return sorted(found)
