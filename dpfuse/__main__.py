"""The door `python -m dpfuse` and the command `dpfuse`; see dpfuse/commands/program.py."""

import sys

from dpfuse.commands.program import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
