<<<<<<< HEAD
"""The entry point of `python -m dpfuse` and the command `dpfuse`; see dpfuse/commands/command_line.py."""
=======
"""The door `python -m dpfuse` and the command `dpfuse`; see dpfuse/commands/command_line.py."""
>>>>>>> h/words

import sys

from dpfuse.commands.command_line import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
