"""The files that a reader saves from a page of `PAGES`, and the commands that a reader types.

A block whose first lines have a comment with only a file's name, such as `# train.py`, is that file. The ```console
blocks of a page are one session of a shell: `$ ` begins a command, and what follows is what it prints. In what is
shown, `…` stands for anything, and a number with a decimal point for any such number. Port 29617 of a page stands for a
free port, so that two runs of the tests on one machine do not meet. After ```console, a marker may follow:

- `varies: reason`: the output is another one in each run;
- `fails`: the last command ends with an error;
- `shown: reason`: the block is not run.

`python -m tests.docs.tutorials PAGE` runs a page, writes what its commands print into it, and keeps the pictures that
it shows. An output that fits what is shown stays as it is, unless it varies.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.processes import clean_environment, free_port
from tests.docs.pages import ROOT, blocks_of, name_of

__all__ = ["IMAGES", "Command", "commands_of", "files_of", "fits", "run"]

IMAGES = ROOT / "docs/images"
DECIMAL = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
SEPARATOR = "=-=-="
PORT = "29617"  # in the pages


@dataclass(frozen=True)
class Command:
    """One command of a page, and what the page says that it prints."""

    text: str
    shown: str
    marker: str
    fails: bool


def files_of(page: Path) -> dict[str, str]:
    """Return the text of each file of a page, by name."""
    blocks = blocks_of(page)
    return {name: block.text + "\n" for block in blocks if (name := name_of(block)) is not None}


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page, in order."""
    found = []
    for block in blocks_of(page):
        if block.language != "console" or block.marker.startswith("shown:"):
            continue
        parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        for number, part in enumerate(parts, start=1):
            lines = part.splitlines()
            count = 1 + next((i for i, line in enumerate(lines) if not line.endswith("\\")), 0)
            fails = "fails" in block.marker and number == len(parts)
            found.append(Command("\n".join(lines[:count]), "\n".join(lines[count:]), block.marker, fails))
    return found


def run(page: Path, folder: Path, timeout: float) -> list[tuple[int, str]]:
    """Save the files of a page into a folder and run its commands there. Return exit code and output of each."""
    for name, text in files_of(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    program = shlex.quote(sys.executable)  # as a reader's: no process that the tests have prepared
    script = [
        f'python() {{ {program} "$@"; }}',
        'torchrun() { python -c "from torch.distributed.run import main; main()" "$@"; }',
        'dpfuse() { python -m dpfuse "$@"; }',
    ]
    port = str(free_port())
    for command in commands_of(page):
        script += [command.text.replace(PORT, port), f'echo "{SEPARATOR} $?"']
    environment = clean_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=environment, timeout=timeout, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
    )  # fmt: skip
    *parts, _ = re.split(rf"{SEPARATOR} (\d+)\n", done.stdout)
    return [(int(code), text) for text, code in zip(parts[::2], parts[1::2], strict=True)]


def fits(shown: str, printed: str) -> bool:
    """Whether a command has printed what the page shows.

    torchrun starts Python with `-u`, so print() writes a line and its end apart, and one rank may write between those
    of another one: then the lines of ranks are compared apart and in their order.
    """
    printed = printed.strip()
    if re.fullmatch(_pattern(shown), f"{printed}\n" if printed else ""):
        return True
    apart = sorted(filter(None, re.sub(r"(?=rank \d+: )", "\n", printed).splitlines()))
    return re.fullmatch(_pattern(shown), "".join(f"{line}\n" for line in apart)) is not None


def write(page: Path) -> None:
    """Run a page, and put what its commands print behind them."""
    with tempfile.TemporaryDirectory() as folder:
        results = run(page, Path(folder), timeout=600)
        text = page.read_text(encoding="utf-8")
        for picture in Path(folder).rglob("*.png"):
            if (name := f"{page.stem}-{picture.name}") in text:
                (IMAGES / name).write_bytes(picture.read_bytes())
    place = 0
    for command, (code, printed) in zip(commands_of(page), results, strict=True):
        old = f"$ {command.text}\n" + (f"{command.shown}\n" if command.shown else "")
        new = f"$ {command.text}\n" + (f"{printed.strip()}\n" if printed.strip() else "")
        place = text.index(old, place)
        if "varies:" not in command.marker and fits(command.shown, printed):
            new = old
        text = text[:place] + new + text[place + len(old) :]
        place += len(new)
        print(f"{code}  {command.text}")
    page.write_text(text, encoding="utf-8")


def _pattern(shown: str) -> str:
    """Return the regular expression of an output, in which decimals and `…` stand for others."""
    lines = []
    for line in shown.strip().splitlines():
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
            continue
        text = "…".join(DECIMAL.sub("\0", part) for part in line.rstrip().split("…"))
        lines.append(re.escape(text).replace("…", ".*?").replace(re.escape("\0"), DECIMAL.pattern) + r" *\n")
    return "".join(lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name).resolve())
