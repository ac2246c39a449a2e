"""What a program is run with to see that no measurement and no check of `patch()` changes a bit of its weights.

It is imported behind `import torch`, which may be one of dpfuse's own imports. So it takes no name from `dpfuse`.
"""

from __future__ import annotations

from dpfuse.ddp.patch import patch
from dpfuse.model.options import CommonOptions

__all__ = ["OPTIONS", "start"]

OPTIONS: CommonOptions = {
    "metrics": True,
    "check_finite": "raise",
    "check_training": "raise",
}


def start() -> None:
    """Called in each process of the program, once torch is imported."""
    patch(**OPTIONS)
