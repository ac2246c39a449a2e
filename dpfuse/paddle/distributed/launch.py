"""`python -m dpfuse.paddle.distributed.launch`: dpfuse's launcher under Paddle's path."""

import sys

from dpfuse.launch import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
