"""What the server that ranks are forked from imports beforehand: they start in a tenth of a second, not in four."""

from __future__ import annotations

from tests.torch_suite.case import load_tests

load_tests()
