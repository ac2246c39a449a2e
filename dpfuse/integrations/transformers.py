"""`DPFuseTrainer`: transformers' `Trainer`, with dpfuse's wrapper and means over all tokens of a step."""

from __future__ import annotations

from dpfuse.integrations.token_weights import TokenWeights

try:
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dpfuse.integrations.transformers needs the package transformers, and there is no module {error.name!r}: "
        "pip install 'dpfuse[transformers]'"
    ) from error

__all__ = ["DPFuseTrainer", "TokenWeights"]


class DPFuseTrainer(TokenWeights, Trainer):
    """transformers' `Trainer` with dpfuse's wrapper, and with the mean over all tokens; it takes the same arguments."""
