"""What the check of loops writes into its log."""

from __future__ import annotations

import logging
from contextlib import contextmanager

from dpfuse.findings import findings

__all__ = ["logged"]


class Records(logging.Handler):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record)


@contextmanager
def logged():
    """The warnings that the log "dpfuse.loop" gets inside of the context."""
    findings.forget()
    logger, records = logging.getLogger("dpfuse.loop"), Records()
    records.setLevel(logging.WARNING)
    logger.addHandler(records)
    try:
        yield records.found
    finally:
        logger.removeHandler(records)
