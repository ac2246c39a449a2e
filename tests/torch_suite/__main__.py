"""Runs one of torch's tests by name, or all of them; see the package.

`--all` works under every release of torch, also where the lists are not of its tests. It prints which tests torch's
class passes and ours does not, and writes that to FILE.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from bench.machine import describe
from tests.torch_suite.case import FACES
from tests.torch_suite.source import ddp_tests
from tests.torch_suite.suite_ranks import SECONDS, failure

ERROR = re.compile(r"[\w.]*(Error|Exception|Warning): ")  # the last line of a traceback


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?")
    what.add_argument("--all", type=Path, metavar="FILE")
    parser.add_argument("--face", choices=FACES, default="dpfuse")
    parser.add_argument("--limit", type=float, default=SECONDS, metavar="SECONDS")
    arguments = parser.parse_args()
    if arguments.all is not None:
        compare(arguments.all)
        return
    text = failure(arguments.name, arguments.face, arguments.limit)
    if text:
        sys.exit(text)
    print(f"{arguments.name} passes with the class of {arguments.face}")


def compare(file: Path) -> None:
    """Run every test with both classes, and write a record."""
    names = sorted(ddp_tests())
    counted = [name for name in names if not failure(name, "torch", limit=20)]
    missed = {}
    for name in counted:
        text = failure(name, "dpfuse")
        print(f"{name} {'fails with ours only' if text else 'passes'}", flush=True)
        if text:
            errors = [line for line in text.splitlines() if ERROR.match(line)]
            missed[name] = errors[-1] if errors else text.splitlines()[-1]
    record = {"machine": describe(gpu=False), "tests": len(names), "torch": len(counted), "ours_fails": missed}
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(names)} tests; torch's class passes {len(counted)}, ours {len(counted) - len(missed)} of these")


if __name__ == "__main__":
    main()
