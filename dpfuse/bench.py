"""The entry point of `python -m dpfuse.bench`, short for `python -m dpfuse bench`."""

import sys

from dpfuse.commands.command_line import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
