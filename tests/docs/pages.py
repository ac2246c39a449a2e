"""The fenced blocks of Markdown pages, and the programs they make up. Runs nothing, imports nothing of dpfuse.

A page's ```python blocks are one program, run from top to bottom, but for each block with an
`if __name__ == "__main__":`, which is a program of its own. A ```output block right behind a Python block
is what that block prints. ```python no-run: reason is not run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

__all__ = ["ROOT", "Block", "Program", "blocks_of", "name_of", "pages", "programs_of", "tutorials"]

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(r"^( *)(`{3,})([\w{}-]*) *(.*)$")
NAME = re.compile(r"^# ([\w-]+\.\w+)$")
WITH_FILES = (
    "move/from_ddp",
    "move/from_paddle",
    "start/first_training",
    "train/gradients",
    "train/launch",
)  # pages of which a reader saves files: see tutorials.py
MAIN = 'if __name__ == "__main__":'
SEPARATOR = "\0"


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    marker: str  # the rest of the info string
    line: int  # of its first line of text, from 1
    text: str
    output: str | None = None  # of a Python block: what it prints, where the page says so


@dataclass(frozen=True)
class Program:
    """Python blocks of one page that share a namespace."""

    page: Path
    blocks: tuple[Block, ...]

    @property
    def source(self) -> str:
        """The program with the line numbers of its page; a separator is printed behind every block."""
        lines: list[str] = []
        for block in self.blocks:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
            if len(self.blocks) > 1:
                lines.append(f"print({SEPARATOR!r}, flush=True)")
        return "\n".join(lines) + "\n"

    def split(self, printed: str) -> list[str]:
        """What each block printed."""
        parts = printed.split(f"{SEPARATOR}\n") if len(self.blocks) > 1 else [printed]
        return parts[: len(self.blocks)]


def pages() -> list[Path]:
    """Every page whose blocks are tested."""
    docs = (ROOT / "docs").rglob("*.md")
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(p for p in docs if "_build" not in p.parts)]


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    found: list[Block] = []
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        if not (opening := FENCE.match(line)):
            continue
        fence, language, marker = opening.group(2, 3, 4)
        inside = []
        for _, text in lines:
            if text.strip() == fence:
                break
            inside.append(text)
        else:
            raise ValueError(f"{page}:{number}: the block is never closed")
        text = dedent("\n".join(inside))
        if language == "output":
            assert found, f"{page}:{number}: output of no block"
            before = found.pop()
            found.append(Block(before.language, before.marker, before.line, before.text, text))
        found.append(Block(language, marker, number + 1, text))
    return found


def tutorials() -> list[Path]:
    """Every page of which a reader saves files."""
    return [ROOT / f"docs/{name}.md" for name in WITH_FILES]


def name_of(block: Block) -> str | None:
    """The name of the file that a block of such a page is, if it is one."""
    found = filter(None, map(NAME.match, block.text.splitlines()[:2]))
    return next((match[1] for match in found), None)


def programs_of(page: Path) -> list[Program]:
    """The programs of a page."""
    python = [b for b in blocks_of(page) if b.language == "python" and not b.marker.startswith("no-run")]
    if page in tutorials():
        python = [block for block in python if name_of(block) is None]
    shared = tuple(block for block in python if MAIN not in block.text)
    alone = [(block,) for block in python if MAIN in block.text]
    return [Program(page, blocks) for blocks in [shared, *alone] if blocks]
