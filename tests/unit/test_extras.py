"""What needs a package that is not installed says which, and how to install it."""

from __future__ import annotations

import importlib
import sys

import pytest

HOW = {
    "dpfuse.integrations.accelerate": ("accelerate", "pip install 'dpfuse[accelerate]'"),
    "dpfuse.integrations.transformers": ("transformers", "pip install 'dpfuse[transformers]'"),
    "dpfuse.integrations.lightning": ("lightning", "pip install 'dpfuse[lightning]'"),
    "dpfuse.integrations.pytorch_lightning": ("lightning_fabric", "pip install pytorch_lightning"),
}


@pytest.mark.parametrize("name", HOW)
def test_an_integration_names_its_package(monkeypatch, name):
    package, remedy = HOW[name]
    for loaded in [each for each in sys.modules if each.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    assert str(caught.value).startswith(f"{name} needs the package {name.rpartition('.')[2]}, and there is no module")
    assert str(caught.value).endswith(remedy)
