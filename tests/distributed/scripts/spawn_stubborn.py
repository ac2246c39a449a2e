"""The ranks of stubborn.py, started by spawn."""

from dpfuse.job import spawn
from tests.distributed.scripts.stubborn import main

if __name__ == "__main__":
    spawn(main, nprocs=2)
