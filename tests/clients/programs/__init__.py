"""Programs of our own in the shape of public ones, beside those in `tests/commands/programs`. None knows dpfuse."""

from pathlib import Path

CLIENTS = Path(__file__).parent
