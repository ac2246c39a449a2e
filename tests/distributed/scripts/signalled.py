"""A rank that says which signals its program gets. It imports no torch, so it starts at once.

Arguments: a folder, then what to do. "early" installs the handlers first, "late" does so once the file `go` is in the
folder, "never" does not. "saves" does what a program does on SIGTERM that needs its time: the second one would end it.
The program ends when the file `end` is in the folder.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER, HOW = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ.get("RANK", "0"))
SHOW = "print(*[line.split()[1] for line in open('/proc/self/status') if line[:6] in ('SigBlk', 'SigIgn')])"


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece, at once


def note(number: int, frame: object) -> None:
    tell("rank", RANK, "got", signal.Signals(number).name)


def save(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    if RANK == 0:
        sys.exit(3)  # peers still save
    time.sleep(2.5)
    tell("rank", RANK, "saved")
    sys.exit(0)


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.02)


def install() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        assert signal.getsignal(number) == signal.SIG_DFL, "libraries install no handler where there is one"
        assert signal.signal(number, note) == signal.SIG_DFL


if HOW == "early":
    install()
if HOW == "saves":
    signal.signal(signal.SIGTERM, save)
tell(f"pid={os.getpid()}")
if HOW == "late":
    wait_for("go")
    install()
wait_for("end")
if HOW == "never":
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    shown = subprocess.run([sys.executable, "-S", "-c", SHOW], capture_output=True, text=True).stdout
    usual = subprocess.run([sys.executable, "-S", "-c", SHOW], capture_output=True, text=True, restore_signals=False)
    tell("rank", RANK, "child", *(int(mask, 16) >> 9 & 0b101 for mask in (shown + usual.stdout).split()))
