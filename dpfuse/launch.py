"""The entry point of `python -m dpfuse.launch` and the command `dpfuse-launch`; see dpfuse/job/launcher.py."""

import sys

from dpfuse.job.launcher import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
