"""Find wording that the style rules forbid, in pages and in Python sources. Runs nothing, imports nothing of dpfuse.

`FORBIDDEN` has the words and what to write instead; a sentence has at most `LONGEST` words. Code, tables of a page,
doctests and commands are not sentences. `python tests/docs/test_words.py dpfuse/engine` prints what it finds.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FORBIDDEN", "LONGEST", "ROOT", "Finding", "findings", "first_mention", "groups"]

ROOT = Path(__file__).parent.parent.parent
LONGEST = 40  # words of a sentence; the house rule asks for about 25
SHORT_STRING = 40  # characters; shorter literals are names and keys

# A regular expression (whole words, any case) -> what to write instead. Code in backticks is not searched.
FORBIDDEN = {
    # Metaphors that were names of modules.
    r"canar(?:y|ies)": "the hook on the forward's outputs, or what it does",
    r"lookouts?": "the thread that watches connections",
    r"whereabouts": "where a rank is, or its last reported position",
    r"verdicts?": "result, or what the check found",
    r"tails?": "the report (in the last bucket); for memory: the last, incomplete chunk",
    r"landings?": "the delivery, or: when the bucket lands",
    r"doors?": "entry point, or: at the boundary",
    r"mischief": "say what goes wrong",
    # A thing is no person. `who` after a person is fine: see `PERSON`.
    r"who": "which, or name the rank, the caller, the object",
    r"whom": "to which, or name the rank",
    r"who(?:so)?ever": "any rank that, any code that",
    r"nobody(?:'s)?": "no rank, no code, no parameter",
    r"somebody(?:'s)?": "a rank, a user, a caller",
    r"(?:him|his|her|hers|he|she)": "it, its, or they, their for users",
    # Archaic or literary forms.
    r"alike": "the same, equal, or: on every rank",
    r"in vain": "without effect, or say what failed",
    r"astray": "say what is wrong",
    r"gone": "removed, freed, ended, or lost",
    r"likewise": "also, or: in the same way",
    r"(?:hence|thus|thereof|whence|thence|hitherto|lest|ere|upon|amid|aught|naught)": "so, of it, from where, on",
    r"shall": "must, or will",
    r"but for": "except, or without",
    r"(?:be|is|are|was|were) content": "accepts, or stops",
    r"affairs?": "say which rank or object decides",
    r"(?:mend|mends|mended|mending)": "fix",
    r"for good": "permanently",
    r"(?:innocent|guilty)": "the ranks that did not fail, the rank that failed",
    r"(?:kin|twins?)": "say what the two have in common",
    r"sees? to(?: it)?": "ensures, or does",
    r"in the places? of others?": "in another parameter's slot",
    r"of its own accord": "without being asked",
    r"as it (?:were|wants?)": "leave it out",
    r"one another": "each other",
    r"betimes|anew|afresh": "again, or early",
}
# Before `who`: then a person is meant.
PERSON = re.compile(
    r"\b(?:users?|people|persons?|readers?|maintainers?|contributors?|developers?|attackers?|authors?|anyone|everyone)"
    r",? $",
    re.IGNORECASE,
)
PATTERNS = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), instead) for word, instead in FORBIDDEN.items()]

CODE = re.compile(r"(`+)(?:.+?)\1", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])")
URL = re.compile(r"https?://\S+")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|cf|vs|No)\.")
SENTENCE_END = re.compile(r"[.!?:;][\"')\]*_]*(?=\s|$)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
ENTRY = re.compile(r"^\s+\*{0,2}`?[\w.]+`?(?:, \*{0,2}\w+)*(?: \([^)]*\))?: ")
SECTION = re.compile(r"^\s*(?:Args|Returns|Raises|Yields|Example|Examples|Note|Attributes|Warns):\s*$")
NO_PROSE = re.compile(r"^#\s*(?:!|noqa|type:|pragma|fmt:|ruff:|mypy:)")


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        where = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{where}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class Paragraph:
    """Lines of prose that belong together."""

    line: int  # of the first, from 1
    lines: tuple[str, ...]
    sentences: bool = True  # False for a table's row, where only words are searched


def findings(path: Path) -> list[Finding]:
    """Return what breaks a rule in a page (.md) or a Python source (.py)."""
    text = path.read_text(encoding="utf-8")
    paragraphs = _of_page(text) if path.suffix == ".md" else _of_source(text)
    found = [finding for paragraph in paragraphs for finding in _judge(path, paragraph)]
    return sorted(found, key=lambda finding: finding.line)


def first_mention(path: Path, word: str) -> str:
    """Return the line in which docstrings and comments of a source use this word, or its plural, first; or nothing."""
    mentions = re.compile(rf"\b{word}s?\b", re.IGNORECASE)
    lines = [
        (paragraph.line + offset, line)
        for paragraph in _of_source(path.read_text(encoding="utf-8"), strings=False)
        for offset, line in enumerate(paragraph.lines)
        if mentions.search(_without_code(ENTRY.sub("", line)))
    ]
    return min(lines)[1].strip() if lines else ""


def groups() -> dict[str, list[Path]]:
    """Return the files that the rules hold for, by folder: `docs/guide`, `dpfuse/engine`, `kernels`, `pages`, ..."""
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]
    names = ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG", "RELEASING", "tests/README")
    found = {"pages": [ROOT / f"{name}.md" for name in names]}
    for path in [*pages, *sorted((ROOT / "dpfuse").rglob("*.py"))]:
        folders = path.relative_to(ROOT).parts[:-1]
        found.setdefault("/".join(folders[:2]), []).append(path)
    return found | {"kernels": sorted((ROOT / "kernels").rglob("*.py"))}


def _judge(path: Path, paragraph: Paragraph) -> Iterator[Finding]:
    text = " ".join(line.strip() for line in paragraph.lines)
    starts = [0]
    for line in paragraph.lines:
        starts.append(starts[-1] + len(line.strip()) + 1)

    def line_of(position: int) -> int:
        return paragraph.line + sum(start <= position for start in starts[1:-1])

    prose = _without_code(text)
    for pattern, instead in PATTERNS:
        for match in pattern.finditer(prose):
            if match.group().lower() == "who" and PERSON.search(prose[: match.start()]):
                continue
            around = text[max(0, match.start() - 30) : match.end() + 30]
            rule = f"'{match.group()}', write: {instead}"
            yield Finding(path, line_of(match.start()), rule, f"...{around}...")
    if not paragraph.sentences:
        return
    begin = 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(prose)), len(prose)]:
        count = sum(any(map(str.isalnum, word)) for word in prose[begin:end].split())
        if count > LONGEST:
            shown = text[begin:end].strip()
            yield Finding(path, line_of(begin), f"a sentence of {count} words", shown)
        begin = end


def _without_code(text: str) -> str:
    """Return a text of the same length; code becomes one word, and the target of a link becomes spaces."""
    text = CODE.sub(lambda match: "x".ljust(len(match.group())), text)
    text = LINK.sub(lambda match: f" {match.group(1)} ".ljust(len(match.group())), text)
    text = URL.sub(lambda match: "x".ljust(len(match.group())), text)
    return ABBREVIATION.sub(lambda match: match.group().replace(".", " "), text)


def _of_page(text: str) -> Iterator[Paragraph]:
    begin, held, fence = 0, list[str](), ""
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        stripped = line.strip()
        opening = re.match(r"`{3,}|~{3,}", stripped)
        if fence:
            fence = "" if stripped == fence else fence
            continue
        row = stripped.startswith("|")
        starts = bool(ITEM.match(line)) or stripped.startswith("#")
        if held and (not stripped or opening or row or starts or held[-1].lstrip().startswith("#")):
            yield Paragraph(begin, tuple(held))
            held = []
        if opening:
            fence = opening.group()
        elif row:
            yield Paragraph(number, (line,), sentences=False)
        elif stripped:
            begin = begin if held else number
            held.append(line)


def _of_source(text: str, *, strings: bool = True) -> Iterator[Paragraph]:
    tree = ast.parse(text)
    documents = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    for document in documents:
        yield from _of_docstring(document.lineno, document.value)
    seen = set(map(id, documents))
    for node in ast.walk(tree) if strings else ():
        if isinstance(node, ast.JoinedStr):
            seen.update(map(id, node.values))
            seen.update(id(v.format_spec) for v in node.values if isinstance(v, ast.FormattedValue))
            if id(node) not in seen:
                yield from _of_string(node.lineno, "".join(_filled(value) for value in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield from _of_string(node.lineno, node.value)
    yield from _of_comments(text)


def _filled(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "`x`"


def _of_string(line: int, text: str) -> Iterator[Paragraph]:
    if len(text) > SHORT_STRING:
        for part in re.split(r"\n", text):
            yield Paragraph(line, (part,))


def _of_docstring(first: int, text: str) -> Iterator[Paragraph]:
    begin, held, indent = 0, list[str](), 0
    doctest = literal = False
    for number, line in enumerate([*text.splitlines(), ""], start=first):
        stripped = line.strip()
        own = len(line) - len(line.lstrip())
        literal = literal and (not stripped or own > indent)
        doctest = (doctest and bool(stripped)) or stripped.startswith(">>>")
        code = literal or doctest or stripped.startswith("|") or bool(SECTION.match(line))
        starts = bool(ITEM.match(line) or ENTRY.match(line))
        if held and (not stripped or code or starts):
            literal = literal or (not code and held[-1].rstrip().endswith("::"))
            yield Paragraph(begin, tuple(held))
            held = []
        if stripped and not code:
            if not held:
                begin, indent = number, own
            held.append(line)


def _of_comments(text: str) -> Iterator[Paragraph]:
    held: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or NO_PROSE.match(token.string):
            continue
        row, column = token.start
        alone = not token.line[:column].strip()
        if held and not (alone and held[-1][:2] == (row - 1, column)):
            yield Paragraph(held[0][0], tuple(line for _, _, line in held))
            held = []
        held.append((row, column, token.string.lstrip("#").strip()))
    if held:
        yield Paragraph(held[0][0], tuple(line for _, _, line in held))
