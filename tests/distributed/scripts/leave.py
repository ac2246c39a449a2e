"""Ends as the argument names; leaves behind a marker of what Python does at its end, and one of its teardown."""

import atexit
import sys
import threading

HOW = sys.argv[1]


class Late:
    """Prints when the interpreter destroys its modules."""

    def __del__(self) -> None:
        sys.__stdout__.write("teardown\n")


late = Late()
atexit.register(print, "atexit")
threading.Thread(target=lambda: threading.Event().wait(0.3) or print("thread")).start()
if HOW == "raise":
    raise ValueError("planted")
if HOW == "text":
    sys.exit("planted")
if HOW != "return":
    sys.exit(int(HOW))
