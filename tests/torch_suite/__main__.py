"""Run one of torch's tests by name; see the package."""

from __future__ import annotations

import argparse
import sys

from tests.torch_suite.case import FACES
from tests.torch_suite.suite_ranks import SECONDS, failure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--face", choices=FACES, default="dpfuse")
    parser.add_argument("--limit", type=float, default=SECONDS, metavar="SECONDS")
    arguments = parser.parse_args()
    text = failure(arguments.name, arguments.face, arguments.limit)
    if text:
        sys.exit(text)
    print(f"{arguments.name} passes with the class of {arguments.face}")


if __name__ == "__main__":
    main()
