"""Pages, docstrings, comments and messages are plain English: no word of `FORBIDDEN`, no sentence above 40 words.

`python tests/docs/test_words.py [FOLDER OR FILE ...]` lists the findings; without an argument, a count per folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # started as a script, Python does not know the folder above `tests`
    sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest

from tests.docs.words import LONGEST, ROOT, findings, first_mention, groups

PENDING: set[str] = set()  # folders whose texts are not yet rewritten


@pytest.mark.parametrize("folder", sorted(groups().keys() - PENDING))
def test_texts_of_a_folder_are_plain_english(folder):
    found = [str(finding) for path in groups()[folder] for finding in findings(path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("folder", ["engine", "gradients", "sharded"])
def test_the_first_mention_of_a_buffer_says_that_it_is_a_communication_buffer(folder):
    """So that no reader takes it for a buffer of a module. Later mentions in the same file are short."""
    lines = {path: first_mention(path, "buffer") for path in sorted((ROOT / "dpfuse" / folder).rglob("*.py"))}
    assert any(lines.values())
    assert {path: line for path, line in lines.items() if line and "communication buffer" not in line} == {}


PAGE = """# A title of the page

The canary is seen, `canary` is code, and [a link](canary.md) is none.
A user who reads this is a person; the bucket who waits is not.

| Word | Meaning |
|---|---|
| tail | {long} |

- {long}
- {short}

```python
verdict = "{long}"
```
"""
SOURCE = '''"""A module. The tail travels.

Args:
    first: {half}
    second: {half}

Example:
    >>> {long}
    1
"""

# A comment which
# nobody reads.
error = f"A message {{error}} of which the verdict is long enough to be read"
short = "canary"
'''


def test_a_page_is_read_as_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(long="word " * (LONGEST + 1), short="word " * LONGEST))
    assert [(finding.line, finding.rule.partition(",")[0]) for finding in findings(page)] == [
        (3, "'canary'"),
        (4, "'who'"),
        (8, "'tail'"),
        (10, f"a sentence of {LONGEST + 1} words"),
    ]


def test_a_source_is_read_as_docstrings_comments_and_messages(tmp_path):
    source = tmp_path / "source.py"
    half = " ".join(["word"] * (LONGEST - 5))
    source.write_text(SOURCE.format(long="word " * (LONGEST + 1), half=half))
    assert [(finding.line, finding.rule.partition(",")[0]) for finding in findings(source)] == [
        (1, "'tail'"),
        (13, "'nobody'"),
        (14, "'verdict'"),
    ]


def main(arguments: list[str]) -> int:
    """Print the findings of the named folders or files, or how many each folder has."""
    if not arguments:
        for folder, paths in groups().items():
            pending = " (pending)" if folder in PENDING else ""
            print(f"{sum(len(findings(path)) for path in paths):5}  {folder}{pending}")
        return 0
    found = []
    for argument in arguments:
        path = (Path.cwd() / argument).resolve()
        files = [*path.rglob("*.md"), *path.rglob("*.py")] if path.is_dir() else [path]
        found += [finding for file in sorted(files) for finding in findings(file)]
    print(*found, f"{len(found)} findings", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    assert ROOT.is_dir()
    raise SystemExit(main(sys.argv[1:]))
