"""Finding a user's model: what is accepted, and what each mistake is told."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from dpfuse.commands.user_model import build, find_factory
from dpfuse.errors import DPFuseError
from tests.commands.models import PLACE


def test_a_factory_returns_the_module_alone_or_with_what_a_benchmark_needs():
    for name in ("build", "with_a_loss"):
        assert isinstance(build(f"{PLACE}:{name}"), nn.Sequential)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("", "expected module:factory, such as mymodel:build"),
        ("models", "expected module:factory, such as mymodel:build"),
        ("models:", "expected module:factory, such as mymodel:build"),
        ("tests/commands/models.py:frozen", r"expected a module, .*: tests\.commands\.models:frozen"),
        ("no_such_module:build", "there is no module 'no_such_module'"),
        ("tests.no_such_module:build", r"there is no module 'tests\.no_such_module'"),
        (f"{PLACE}:biuld", "has no 'biuld'; did you mean 'build'"),
        (f"{PLACE}:xyz", "has no 'xyz'; expected a function"),
        (f"{PLACE}:not_callable", "is of type int; expected a function without arguments that returns a module"),
        (f"{PLACE}:number", r"returned a module of type int; expected a torch\.nn\.Module"),
        (f"{PLACE}:numbers", r"returned a module of type int; expected a torch\.nn\.Module"),
        (f"{PLACE}:nothing", r"returned a module of type tuple; expected a torch\.nn\.Module"),
        (f"{PLACE}:lazy", "parameter 'weight' has no shape yet; expected the model after a first forward"),
        (f"{PLACE}:wrapped", "returned a DataParallel; expected the module that it wraps"),
        (f"{PLACE}:frozen", "the Linear has no parameter with requires_grad=True"),
    ],
)
def test_what_is_wrong_is_said(place, text):
    with pytest.raises(DPFuseError, match=text):
        build(place)


def written(tmp_path, monkeypatch, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / f"{name}.py"


RAISES = {  # what is wrong: the file, what it is called, and the user's line and the exception
    "an import": ("import no_such_library\n", "the import of {name}", "import no_such_library", "ModuleNotFoundError"),
    "syntax": ("def build(:\n", "the import of {name}", "def build(:", "SyntaxError"),
    "a factory": ("def build():\n    return 1 / 0\n", "the factory", "return 1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("case", RAISES)
def test_what_the_users_code_raises_is_shown_with_the_users_lines_only(tmp_path, monkeypatch, case):
    text, what, line, kind = RAISES[case]
    name = f"raises_in_{case.replace(' ', '_')}"
    path = written(tmp_path, monkeypatch, name, text)
    with pytest.raises(DPFuseError) as caught:
        build(f"{name}:build")
    told = str(caught.value)
    assert told.startswith(f"{name}:build: {what.format(name=name)} raised {kind}, expected no exception.")
    assert str(path) in told
    assert line in told
    assert "user_model.py" not in told
    assert "importlib" not in told
    assert caught.value.__cause__ is not None


def test_a_factory_that_needs_arguments_is_told_so(tmp_path, monkeypatch):
    written(tmp_path, monkeypatch, "needs_arguments", "def build(width, depth=2, *rest, scale): pass\n")
    with pytest.raises(DPFuseError, match="needs the arguments width, scale; expected a function without arguments"):
        build("needs_arguments:build")


def test_the_current_folder_is_looked_into(tmp_path, monkeypatch):
    (tmp_path / "model_of_here.py").write_text("def build(): pass")
    monkeypatch.chdir(tmp_path)
    # As a console script has it.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert find_factory("model_of_here:build").__name__ == "build"
