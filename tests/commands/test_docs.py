"""Every command line shown is understood, and the plan that a page shows is what is printed."""

from __future__ import annotations

import shlex
import sys

import pytest

from dpfuse.commands.command_line import _parser, main
from tests.docs.pages import ROOT, blocks_of, pages

PAGE = ROOT / "docs" / "reference" / "environment.md"
TRY_IT = ROOT / "docs" / "start" / "try_it.md"
DOORS = ("dpfuse ", "python -m dpfuse ")


def commands(page):
    """The arguments of each command, and the lines that it is said to print."""
    for block in blocks_of(page):
        found = None
        for line in block.text.splitlines() if block.language in ("console", "bash") else []:
            line = line.partition("#")[0].partition(" | ")[0].rstrip()
            words = line.removeprefix("$ ")
            shown = block.language == "bash" or line.startswith("$ ")  # and not the output of a command
            door = next((door for door in DOORS if shown and words.startswith(door)), None)
            if door is not None:
                found = shlex.split(words.removeprefix(door)), []
                yield found
            elif found is not None:
                found[1].append(line)


SHOWN = [pytest.param(*one, id=shlex.join(one[0])) for page in pages() for one in commands(page)]


@pytest.mark.parametrize(("arguments", "lines"), SHOWN)
def test_a_command_line_is_understood(arguments, lines):
    _parser().parse_args(arguments)


def test_the_pages_show_every_option():
    text = PAGE.read_text(encoding="utf-8") + TRY_IT.read_text(encoding="utf-8")
    for command in _parser()._subparsers._group_actions[0].choices.values():
        for action in command._actions:
            if action.option_strings and action.dest != "help":
                assert action.option_strings[0] in text


def test_the_plan_is_what_is_shown(tmp_path, monkeypatch, capsys):
    (source,) = [block.text for block in blocks_of(PAGE) if block.language == "python"]
    (tmp_path / "mymodel.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    plans = [(arguments, lines) for arguments, lines in commands(PAGE) if arguments[0] == "plan"]
    assert plans
    for arguments, lines in plans:
        assert main(arguments) == 0
        assert capsys.readouterr().out.rstrip("\n").splitlines() == lines
    del sys.modules["mymodel"]
