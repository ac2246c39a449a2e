"""A parent that waits for its ranks, for the test to kill."""

import sys

from dpfuse.job import spawn
from tests.distributed.scripts.functions import sleeps

if __name__ == "__main__":
    spawn(sleeps, args=(sys.argv[1],), nprocs=2)
