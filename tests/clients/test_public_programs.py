"""Programs around public libraries have the same losses and weights with dpfuse as with torch's class, bit for bit."""

from __future__ import annotations

import pytest

from tests.clients.public import PINNED, PUBLIC, installed, said_by_dpfuse
from tests.commands.side_by_side import assert_same

MISSING = [f"{package}=={pin}" for package, pin in PINNED.items() if installed(package) != pin]
REASON = f"`make test-public` installs {', '.join(MISSING)}"
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.skipif(bool(MISSING), reason=REASON)]

STEPS = 8


@pytest.mark.parametrize("name", PUBLIC)
def test_the_losses_and_weights_are_those_of_torchs_class(name, tmp_path):
    plain, ours = (PUBLIC[name].run(wrapper, tmp_path / wrapper, STEPS) for wrapper in ("torch", "dpfuse"))
    assert_same(plain, ours, PUBLIC[name].first)
    assert said_by_dpfuse(ours.stderr) == []
