"""Counts the pages of the project and their words: `python -m docs.count [PAGE …]`.

A page is a Markdown file that git tracks. A word is what stands between blanks and has a letter or a digit. Words in
code blocks are not counted. Ends with 1 if there are more than 40 pages or 38,000 words.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES, WORDS = 40, 38_000
BLOCK = re.compile(r"^ *(`{3,}).*?^ *\1[ \t]*$", re.MULTILINE | re.DOTALL)


def words(text: str) -> int:
    """Return the number of words outside code blocks."""
    return sum(1 for word in BLOCK.sub(" ", text).split() if re.search(r"\w", word))


def main(names: list[str]) -> int:
    """Print the words of each page, the longest page last, and the sum."""
    command = ["git", "-C", str(ROOT), "ls-files", "*.md"]
    pages = names or subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    counts = {page: words((ROOT / page).read_text(encoding="utf-8")) for page in pages}
    for page, count in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{count:6}  {page}")
    print(f"{sum(counts.values()):6}  words on {len(counts)} pages (at most {WORDS} on {PAGES})")
    return int(len(counts) > PAGES or sum(counts.values()) > WORDS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
