"""Ends as its argument says, and marks what Python does at its end, and whether it takes its modules apart."""

import atexit
import ctypes
import sys
import threading

HOW, LOG = sys.argv[1:]


class Late:
    """Prints when the interpreter destroys its modules."""

    def __del__(self) -> None:
        sys.__stdout__.write("teardown\n")


late = Late()
log = open(LOG, "w", encoding="utf-8")  # noqa: SIM115  # left open
log.write("buffered")
c = ctypes.CDLL(None)
c.fopen.restype = ctypes.c_void_p
c.fputs(b"buffered", ctypes.c_void_p(c.fopen(f"{LOG}.c".encode(), b"w")))
atexit.register(print, "atexit")
threading.Thread(target=lambda: threading.Event().wait(0.3) or print("thread")).start()
if HOW == "raise":
    raise ValueError("planted")
if HOW == "text":
    sys.exit("planted")
if HOW != "return":
    sys.exit(int(HOW))
