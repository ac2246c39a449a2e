"""The door `python -m dpfuse.launch` and the command `dpfuse-launch`; see dpfuse/job/launch.py."""

import sys

from dpfuse.job.launch import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
