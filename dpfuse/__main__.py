"""The entry point of `python -m dpfuse` and the command `dpfuse`; see dpfuse/commands/command_line.py."""

import sys

from dpfuse.commands.command_line import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
