"""Predicts the speed of the pack on an H100 or H200 from its compiled code: `python -m bench.predict`.

No kernel runs. The compiler says how many registers a thread takes. From that follow how many programs fit on a
multiprocessor, how many bytes they read at the same time, and what the last wave of programs costs. The record is
written before the first run on a GPU, so that this run can confirm or refute it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import ROOT, describe
from bench.size_list import bucket_shapes

__all__ = ["Card", "main", "predict", "resident"]

CASES = (("resnet50", 1), ("resnet50", 25), ("resnet50", 100), ("tiny_2000", 8))  # MiB, as in bench_kernels
RESULT = ROOT / "bench" / "results" / "predictions-sm90.json"


class Card(NamedTuple):
    """What is known of a card. H100 and H200 differ in the bandwidth only."""

    multiprocessors: int = 132
    threads: int = 2048  # of a multiprocessor
    registers: int = 65_536
    programs: int = 32
    bandwidth: float = 4.8e12  # bytes per second, read and written
    latency: float = 8e-7  # seconds of a read that misses all caches, under load


def resident(registers: int, warps: int, card: Card) -> int:
    """Return how many programs fit on a multiprocessor. Registers are given to warps in units of 256.

    Args:
        registers: of a thread.
        warps: of a program.
        card: the GPU.

    Example:
        >>> resident(registers=32, warps=8, card=Card()), resident(registers=64, warps=8, card=Card())
        (8, 4)
    """
    of_warp = math.ceil(registers * 32 / 256) * 256
    return min(card.threads // (32 * warps), card.registers // (of_warp * warps), card.programs)


def predict(row: dict[str, Any], sizes: str, size: int, card: Card) -> dict[str, Any]:
    """Return the expected share of the card's bandwidth for one kernel and one bucket.

    Args:
        row: kernel, dtypes, shape, registers and spilled bytes, as compiled.
        sizes: the list of tensors in the bucket.
        size: MiB of the tensors.
        card: the GPU.
    """
    chunk, warps = row["shape"]
    read, written = _bytes(row["dtype"]), _bytes(row["wire"])
    if row["kernel"].startswith("unflatten"):
        read, written = written, read
    numels = [math.prod(shape) for shape in bucket_shapes(sizes, (size << 20) // _bytes(row["dtype"]))]
    programs = sum(math.ceil(numel / chunk) for numel in numels)
    moved = sum(numels) / programs  # elements of a program, on average
    at_once = resident(row["registers"], warps, card)
    places = card.multiprocessors * at_once
    in_flight = at_once * moved * read  # each thread has asked for all its elements before it uses the first
    # Little's law: so many bytes must be on their way to a multiprocessor for its share of the reads.
    needed = card.bandwidth * read / (read + written) * card.latency / card.multiprocessors
    filled = in_flight / needed
    waves = programs / places
    full, rest = math.floor(waves), waves - math.floor(waves)
    # In units of the time in which a full wave passes the memory. Where a part of the places is enough to fill the
    # memory's pipeline, the last wave loses nothing. The first read and the last write wait for the latency.
    wave_seconds = places * moved * (read + written) / card.bandwidth
    time = full / min(1.0, filled) + (rest / min(1.0, filled * rest) if rest else 0.0)
    share = waves / (time + 2 * card.latency / wave_seconds)
    return {
        **{key: row[key] for key in ("kernel", "dtype", "wire", "shape", "registers", "spilled")},
        "sizes": sizes,
        "MiB": size,
        "programs": programs,
        "programs_per_multiprocessor": at_once,
        "KiB_in_flight_per_multiprocessor": round(in_flight / 1024, 1),
        "KiB_needed": round(needed / 1024, 1),
        "waves": round(waves, 2),
        "share": round(share, 3),
    }


def compiled(what: str) -> list[dict[str, Any]]:
    """Return what Triton's compiler says of the kernels for sm_90; no GPU is needed."""
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", what, "90", "0", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(arguments: list[str] | None = None) -> int:
    """Compile, predict, print a table and write the record."""
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT, help="the record (default: %(default)s)")
    options = parser.parse_args(arguments)
    card = Card()
    rows = [predict(row, sizes, size, card) for row in compiled("shapes") for sizes, size in CASES]
    done = subprocess.run(
        [sys.executable, "-m", "bench.pack_host"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    host = json.loads(done.stdout)
    record = {"card": card._asdict(), "machine": describe(gpu=False), "host_microseconds": host, "predictions": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        if row["MiB"] in (8, 25):
            print(
                f"{row['sizes']:9} {row['kernel']:10} {row['dtype']:>9} {row['wire']:>9}  chunk {row['shape'][0]:5} "
                f"warps {row['shape'][1]:2}  {row['registers']:3} registers  {row['spilled']:3} spilled  "
                f"{row['programs_per_multiprocessor']:2} programs  {row['KiB_in_flight_per_multiprocessor']:6} KiB  "
                f"share {row['share']:.2f}"
            )
    for what, times in host.items():
        packs = ", ".join(f"{microseconds} us for {count}" for count, microseconds in times.items())
        print(f"host time of a pack here, {what}: {packs} tensors")
    print(f"record: {options.out}")
    return 0


def _bytes(dtype: str) -> int:
    return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[dtype]


if __name__ == "__main__":
    sys.exit(main())
