"""`import dpfuse` imports neither torch nor the library. The first use of a name does, and every name is found."""

from __future__ import annotations

import sys

import pytest

import dpfuse
import dpfuse.checkpoint
from tests.distributed.processes import run

FIRST_USE = """
import sys
import dpfuse
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "dpfuse")))
print(set(dpfuse.__all__) - set(dir(dpfuse)), hasattr(dpfuse, "__wrapped__"), "torch" in sys.modules)
print(dpfuse.engine.plan.MB)
from dpfuse import *
print([name for name in dpfuse.__all__ if name not in globals()], "torch" in sys.modules)
"""


def test_the_import_alone_imports_nothing_else_and_then_parts_and_names_are_there():
    done = run("-c", FIRST_USE, warm=False)
    lines = ["['dpfuse', 'dpfuse.version']", "set() False False", "1048576", "[] True"]
    assert done.stdout.splitlines() == lines, done.stderr


def test_an_unknown_name_is_an_error_that_names_the_package():
    with pytest.raises(AttributeError, match=r"module 'dpfuse' has no attribute 'DataParalel'"):
        _ = dpfuse.DataParalel
    with pytest.raises(ImportError, match="cannot import name 'DataParalel' from 'dpfuse'"):
        from dpfuse import DataParalel  # noqa: F401


def test_a_name_that_a_program_has_set_stays(monkeypatch):
    monkeypatch.setattr(dpfuse, "DataParallel", None)
    assert not hasattr(dpfuse, "unknown")
    assert dpfuse.DataParallel is None


def test_that_a_part_cannot_be_imported_is_not_hidden(monkeypatch):
    """`hasattr`, and `from dpfuse import` more so, take an AttributeError for a name that is missing."""
    with monkeypatch.context() as patch:
        patch.delattr(dpfuse.checkpoint, "load_checkpoint")
        with pytest.raises(ImportError, match=r"dpfuse\.checkpoint cannot be imported: .*'load_checkpoint'"):
            hasattr(dpfuse, "unknown")
    monkeypatch.setitem(sys.modules, "dpfuse.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match=r"dpfuse\.checkpoint"):
        hasattr(dpfuse, "unknown")
