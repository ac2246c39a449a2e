"""Behaves as scripts do: starts processes that import it again, and leaves through sys.exit(0)."""

import multiprocessing
import sys


def square(x: int) -> int:
    return x * x


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [2, 3]), flush=True)
    sys.exit(0)
