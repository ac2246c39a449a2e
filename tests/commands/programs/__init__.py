"""Programs of our own in the shape of public ones. None of them knows dpfuse."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
