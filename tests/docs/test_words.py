"""Pages, docstrings and errors are plain English: no word of `WORDS`, and no sentence of more than 40 words.

`python tests/docs/test_words.py [FOLDER OR FILE ...]` lists what breaks these rules, and says what to write instead.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 40  # words of a sentence; the house rule asks for about 25
SHORT_STRING = 40  # characters; shorter literals are names and keys

# Words that few readers know who are not native, and what to write instead. Code in backticks is not searched.
WORDS = {
    "anew|afresh": "again",
    "hence|thus|thereof|whence": "so",
    "who(?:so)?ever": "any rank that, any code that",
    "nobody|somebody": "no rank, a caller",
    "alike": "the same, equal",
    "in vain": "without effect",
    "astray": "say what is wrong",
    "amid|upon": "in, on",
    "lest": "so that ... not",
    "likewise": "also",
    "for good": "permanently",
}
FORBIDDEN = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), instead) for words, instead in WORDS.items()]

CODE = re.compile(r"`+.+?`+|https?://\S+", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])")
SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bvs)[.!?:;][\"')\]*_]*(?=\s|$)")
SECTION = re.compile(r"^\s*(?:Args|Returns|Raises|Yields|Examples?|Note|Attributes|Warns):\s*$")
# A line that begins a paragraph of its own: a heading, an item, the row of a table, an argument.
BEGIN = re.compile(r"^\s*(?:#|\||[-*+] |\d+[.)] )|^\s+\*{0,2}`?[\w.]+`?(?:, \*{0,2}\w+)*(?: \([^)]*\))?: ")


def paragraphs(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """The prose of a page or docstring, with the number of the first line of each part; code is left out."""
    begin, held, fence, doctest, formula = first, list[str](), "", False, False
    for number, line in enumerate([*text.splitlines(), ""], start=first):
        stripped = line.strip()
        opening = re.match(r"`{3,}|~{3,}", stripped)
        if fence:
            fence = "" if stripped == fence else fence
            continue
        doctest = (doctest and bool(stripped)) or stripped.startswith(">>>")
        formula = formula and (not stripped or line.startswith("    "))
        code = bool(opening) or doctest or formula or bool(SECTION.match(line))
        if held and (not stripped or code or BEGIN.match(line) or held[0].startswith("#")):
            yield begin, " ".join(held)
            formula, held = held[-1].endswith("::"), []
        if opening:
            fence = opening.group()
        elif stripped and not code:
            begin = begin if held else number
            held.append(stripped)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """The paragraphs of a page, or of the docstrings and messages of a source."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from paragraphs(text)
        return
    tree = ast.parse(text)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            filled = [str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values]
            yield from paragraphs("".join(filled), node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = inspect.cleandoc(node.value)
            yield from paragraphs(text if len(text) > SHORT_STRING else "", node.lineno)


def findings(path: Path) -> list[tuple[int, str]]:
    """What breaks a rule in a page (.md) or a Python source (.py): the line at which its paragraph begins, and why."""
    found = []
    for line, text in prose_of(path):
        prose = LINK.sub(r" \1 ", CODE.sub("x", text))
        for pattern, instead in FORBIDDEN:
            found += [(line, f"'{match.group()}', write: {instead}") for match in pattern.finditer(prose)]
        for sentence in () if text.startswith("|") else SENTENCE_END.split(prose):
            count = sum(any(map(str.isalnum, word)) for word in sentence.split())
            if count > LONGEST:
                found.append((line, f"a sentence of {count} words: {sentence.strip()}"))
    return sorted(found)


def groups() -> dict[str, list[Path]]:
    """The files that the rules hold for, by folder: `docs/wrong`, `dpfuse/engine`, `kernels`, `pages`, ..."""
    names = ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG", "RELEASING", "tests/README")
    found = {"pages": [ROOT / f"{name}.md" for name in names]}
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]
    for path in [*pages, *sorted((ROOT / "dpfuse").rglob("*.py"))]:
        found.setdefault("/".join(path.relative_to(ROOT).parts[:-1][:2]), []).append(path)
    return found | {"kernels": sorted((ROOT / "kernels").rglob("*.py"))}


def lines_of(paths: list[Path]) -> list[str]:
    """What is found in some files, in a line each."""
    return [f"{path}:{line}: {what}" for path in paths for line, what in findings(path)]


@pytest.mark.parametrize("folder", sorted(groups()))
def test_texts_of_a_folder_are_plain_english(folder):
    found = lines_of(groups()[folder])
    assert not found, "\n" + "\n".join(found)


LONG, SHORT = "word " * (LONGEST + 1), "word " * LONGEST
PAGE = f"A link [is alike](hence.md).\n`anew` is code.\n\n| {LONG} |\n\n- {LONG}\n- {SHORT}\n\n```\n{LONG}\n```\n"
MESSAGE = 'e = f"A message {e} is made in vain, and is read."'
SOURCE = f'"""This module is made anew, and is read so.\n\nArgs:\n    a: {SHORT}\n\n>>> {LONG}\n"""\n{MESSAGE}\n'


@pytest.mark.parametrize(("name", "text", "lines"), [("a.md", PAGE, [1, 6]), ("a.py", SOURCE, [1, 8])])
def test_prose_is_read_and_code_is_not(tmp_path, name, text, lines):
    (tmp_path / name).write_text(text)
    assert [line for line, _ in findings(tmp_path / name)] == lines


if __name__ == "__main__":
    named = [Path(each).resolve() for each in sys.argv[1:]] or [ROOT / "docs", ROOT / "dpfuse", ROOT / "kernels"]
    listed = lines_of(
        [file for path in named for file in ([*path.rglob("*.md"), *path.rglob("*.py")] if path.is_dir() else [path])]
    )
    print(*listed, f"{len(listed)} findings", sep="\n")
    raise SystemExit(bool(listed))
