"""The door `python -m dpfuse.launch` and the command `dpfuse-launch`; see dpfuse/distributed/launch.py."""

import sys

from dpfuse.distributed.launch import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
