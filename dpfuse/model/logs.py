"""The loggers of dpfuse, children of "dpfuse", and DPFUSE_LOGS, which shows them on stderr. Logs nothing itself."""

from __future__ import annotations

import logging
import os

__all__ = ["LOGS", "VARIABLE", "show_chosen_logs"]

VARIABLE = "DPFUSE_LOGS"
LOGS = {
    "plan": "the buckets with which a wrapper starts",
    "rebuild": "the buckets after the first synchronised backward",
    "group": "what the back end of a process group can do on GPUs",
    "loop": "what a training loop could save, groups of one rank, and checks that failed",
    "weights": "where weights of the ranks are not compared, and why",
    "failed": "how a rank has completed a backward that an exception ended",
    "slow": "ranks that are late in each step, and communication that has become slow",
    "stall": "ranks that are silent, slow, or have failed",
}


def show_chosen_logs() -> None:
    """Show the logs that DPFUSE_LOGS names on stderr, once.

    Raises:
        ValueError: there is no such log.

    Example:
        >>> import logging, os
        >>> from dpfuse.model.logs import show_chosen_logs
        >>> os.environ["DPFUSE_LOGS"] = "plan"
        >>> show_chosen_logs()
        >>> logging.getLogger("dpfuse.plan").isEnabledFor(logging.INFO)
        True
        >>> del os.environ["DPFUSE_LOGS"]

    Source: the environment variable TORCH_LOGS of torch.
    """
    chosen = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    for name in chosen:
        if name not in LOGS:
            raise ValueError(f"{VARIABLE} names {name!r}, expected some of {', '.join(LOGS)}, separated by commas")
    for name in chosen:
        logger = logging.getLogger(f"dpfuse.{name}")
        if not any(handler.name == VARIABLE for handler in logger.handlers):
            handler = logging.StreamHandler()
            handler.name = VARIABLE
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False  # a program with a handler of its own would show each record twice
