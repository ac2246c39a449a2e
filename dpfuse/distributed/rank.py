"""What runs in a rank around the user's program. Standard library only.

The launcher starts each rank as `python rank.py <launcher's pid> script|module <target> <arguments>`: by
its path, so that torch is not imported before the script's own first lines, which may set variables that
torch reads.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import ModuleType, TracebackType

__all__ = ["die_with_parent", "leave_group", "record_exception"]

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
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    note = {
        "message": f"{name}: {error}" if str(error) else name,
        "extraInfo": {"py_callstack": stack, "timestamp": str(int(now)), "seen": now},
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": note}, file)
    except OSError as problem:
        # The exception itself is what the user must see.
        print(f"dpfuse: could not write {path}: {problem}", file=sys.stderr)


def leave_group() -> None:
    """Destroy the process group after a program that went well.

    Left to the interpreter's end, its threads are torn down in no order (NCCL warns; now and then a rank
    aborts after all its work is done). Never after a failure: NCCL could wait for a collective that no peer
    joins.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


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
    went_well = False

    def finish() -> None:
        if went_well:
            leave_group()

    # Registered before the program's own, so it runs after them.
    atexit.register(finish)
    try:
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_script(target)
        went_well = True
    except SystemExit as error:
        went_well = error.code is None or error.code == 0
        if not went_well:
            record_exception(error, record)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        error = error.with_traceback(_own_frames_removed(error))
        record_exception(error, record)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    main()
