"""Runs thousands of random programs, and keeps a record: `python -m tests.random_programs FILE`.

The record has the machine, the commit, and for each kind how many programs were run, how many were wrong, and the
seconds for each. What a wrong program has done stands below. It is run again by its kind, the number of ranks and its
seed: `--kind`, `--ranks`, `--first` and `--programs 1`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

from bench.machine import describe
from tests.random_programs.kinds import KINDS, MESH, wrong_ones
from tests.ranks import RankError, RankPool
from tests.recorded import record_of

# How many programs are of a kind, on so many ranks, beside the others. Two ranks have a core each.
SHARES = {(kind, ranks): share for ranks, share in ((2, 12), (3, 2)) for kind in KINDS} | {(MESH, 4): 4}
AT_ONCE = 20  # programs in one call of the ranks
TIMEOUT = 300  # seconds for those


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs, write the record, and return whether some were wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("file", help="of the record")
    parser.add_argument("--programs", type=int, default=4000, help="how many, of all kinds together")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first program of each kind")
    parser.add_argument("--kind", choices=[*KINDS, MESH], help="run only this kind")
    parser.add_argument("--ranks", type=int, choices=[2, 3, 4], help="run only programs on so many ranks")
    options = parser.parse_args(arguments)
    shares = {
        (kind, ranks): share
        for (kind, ranks), share in SHARES.items()
        if kind == (options.kind or kind) and ranks == (options.ranks or ranks)
    }
    began, count, wrong = perf_counter(), 0, []
    lines = [_row("kind", "ranks", "programs", "wrong", "seconds each")]
    for (kind, ranks), share in shares.items():
        number = max(1, round(options.programs * share / sum(shares.values())))
        begin = perf_counter()
        found = [*_wrong(kind, ranks, range(options.first, options.first + number))]
        lines.append(_row(kind, ranks, number, len(found), f"{(perf_counter() - begin) / number:.3f}"))
        print(lines[-1], flush=True)
        wrong += [f"{kind}, {ranks} ranks, {text}" for text in found]
        count += number
    took = perf_counter() - began
    lines.append(_row("all", "", count, len(wrong), f"{took / count:.3f}, {took / 60:.1f} minutes"))
    lines += [line for text in wrong for line in ("", *text.splitlines())]
    text = record_of(describe(gpu=False), "python -m tests.random_programs", lines)
    Path(options.file).write_text(text)
    print(text)
    return int(bool(wrong))


def _wrong(kind: str, ranks: int, seeds: Sequence[int]) -> Iterator[str]:
    """Run the programs of these seeds in processes of their own; yield what the wrong ones have done."""
    pool = RankPool(ranks)
    for start in range(0, len(seeds), AT_ONCE):
        some = seeds[start : start + AT_ONCE]
        if pool.crowded or not pool.healthy:
            pool.ask_to_end()
            pool.close()
            pool = RankPool(ranks)
        try:
            yield from pool.run(wrong_ones, kind, some, timeout=TIMEOUT)[0]
        except RankError as error:
            yield f"one of the seeds {some[0]} to {some[-1]}\n{error}"
    pool.ask_to_end()
    pool.close()


def _row(kind: str, ranks: object, programs: object, wrong: object, seconds: str) -> str:
    return f"{kind:18} {ranks:>5} {programs:>9} {wrong:>6}  {seconds}"


if __name__ == "__main__":
    sys.exit(main())
