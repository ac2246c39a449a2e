"""What runs in a rank around the user's program. Standard library only.

The launcher starts each rank as `python rank.py <launcher's pid> script|module <target> <arguments>`: by
its path, so that torch is not imported before the script's own first lines, which may set variables that
torch reads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from types import ModuleType, TracebackType
from typing import NoReturn

__all__ = ["die_with_parent", "end_process", "record_exception"]

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have ended before the call took effect.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def record_exception(error: BaseException, path: str | None) -> None:
    """Leave a note on why this rank fails, in torchrun's form, for the launcher to read."""
    if not path:
        return
    name = type(error).__name__
    now = time.time()
    # What the process will end with, unless a launcher that saw a peer fail ends it on its way out.
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    note = {
        "message": f"{name}: {error}" if str(error) else name,
        "extraInfo": {"py_callstack": stack, "timestamp": str(int(now)), "seen": now, "exit_code": code},
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": note}, file)
    except OSError as problem:
        # The exception itself is what the user must see.
        print(f"dpfuse: could not write {path}: {problem}", file=sys.stderr)


def end_process() -> NoReturn:
    """End this process, after a program that went well, with exit code 0.

    Everything is done that Python does at its end, up to the point where it takes itself and the libraries
    apart: there, now and then, a thread of one of them still runs, and a rank aborts after all its work is done.
    The process group is destroyed before, but never after a failure: NCCL could wait for a collective that no
    peer joins.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of Python does
    atexit._run_exitfuncs()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        # Closed, or a pipe that nobody reads any more.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _run_script(path: str) -> None:
    # A real __main__, as `python path` has it: runpy would take it away again while threads still use it.
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath(path)
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), module.__file__, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _own_frames_removed(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace


def main() -> None:
    launcher, kind, target, *arguments = sys.argv[1:]
    die_with_parent(int(launcher))
    record = os.environ.get("TORCHELASTIC_ERROR_FILE")
    sys.argv = [target, *arguments]
    # Python put this file's folder first; the program expects its own there.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target))
    try:
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_script(target)
    except SystemExit as error:
        if error.code is not None and error.code != 0:
            record_exception(error, record)
            raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        error = error.with_traceback(_own_frames_removed(error))
        record_exception(error, record)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    end_process()


if __name__ == "__main__":
    main()
