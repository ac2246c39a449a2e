"""Ends as its argument says; leaves behind markers of what Python does at its end, and one of its teardown."""

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
log = open(LOG, "w", encoding="utf-8")
log.write("buffered")
ctypes.CDLL(None).printf(b"C\n")
atexit.register(print, "atexit")
threading.Thread(target=lambda: threading.Event().wait(0.3) or print("thread")).start()
if HOW == "raise":
    raise ValueError("planted")
if HOW == "text":
    sys.exit("planted")
if HOW != "return":
    sys.exit(int(HOW))
