"""What runs in a rank around the user's program. Imports the standard library only.

The launcher starts each rank as `python rank_program.py <Launch as JSON> script|module <target> <arguments>`. It
starts the file by its path, so that torch is not imported before the first lines of the user's script: these may set
variables that torch reads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

__all__ = [
    "KEPT_SIGNALS",
    "SECONDS_TO_END",
    "Launch",
    "die_with_parent",
    "end_process",
    "end_within",
    "exit_code_of",
    "keep_signals",
    "record_exception",
    "set_paddle_variables",
]

KEPT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # with which schedulers announce the end of a job
SECONDS_TO_END = 8  # that a rank gets to end after it failed or was asked to; torchrun gives 30
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
SECONDS_TO_WRITE = 60
BUFFERED = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom  # a text is written into one of the others


@dataclass(frozen=True)
class Launch:
    """What the launcher tells a rank in addition to torch's variables."""

    pid: int  # of the launcher
    gpus: int  # the number that is visible
    hosts: Sequence[str] = ()  # the address of every node, by node rank, if all are known
    host: str = ""  # the address of this node, if it is known
    one_log: bool = False  # whether stderr goes into the file of stdout
    seconds_to_end: float = SECONDS_TO_END
    shows_interrupts: bool = True  # whether a KeyboardInterrupt that ends the program has a traceback


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, for any reason. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have ended before the call took effect.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def keep_signals() -> None:
    """Keep SIGUSR1 and SIGUSR2 for the program, as long as it has no handler for them.

    Their default action is to end the process. From now on it is to keep the signal: the next handler that the program
    installs with `signal.signal` is called for it at once. Several signals of one number are one, as pending ones are.
    `signal.getsignal` still returns `SIG_DFL`, since libraries ask it whether they may install a handler.

    The process keeps them in a handler, and not by blocking them or by `SIG_IGN`: what it starts would inherit those.
    So a program that it executes finds the default action, and a fork keeps its own signals.
    """
    kept: set[int] = set()
    install, installed = signal.signal, signal.getsignal

    def keep(number: int, frame: FrameType | None) -> None:
        kept.add(number)

    def shown(handler: Any) -> Any:
        return signal.SIG_DFL if handler is keep else handler

    @functools.wraps(install)
    def install_and_call(signalnum: int, handler: Any) -> Any:
        if signalnum not in KEPT_SIGNALS:
            return install(signalnum, handler)
        if handler == signal.SIG_DFL:
            before = install(signalnum, keep)
            signal.siginterrupt(signalnum, False)  # a signal that nothing handles interrupts no system call
            return shown(before)
        before = install(signalnum, handler)
        if signalnum in kept:
            kept.discard(signalnum)
            signal.raise_signal(signalnum)
        return shown(before)

    @functools.wraps(installed)
    def get_shown(signalnum: int) -> Any:
        return shown(installed(signalnum))

    signal.signal, signal.getsignal = install_and_call, get_shown
    os.register_at_fork(after_in_child=kept.clear)
    for number in KEPT_SIGNALS:
        if installed(number) == signal.SIG_DFL:  # otherwise a module that Python imports at its start has a handler
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT_SIGNALS)  # as the launcher has started this process


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def set_paddle_variables(
    environ: MutableMapping[str, str], gpus: int, hosts: Sequence[str] = (), host: str = ""
) -> None:
    """Set Paddle's variables to what torch's say, and remove those of a surrounding job.

    Args:
        environ: holds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR
            and MASTER_PORT.
        gpus: the number that is visible.
        hosts: the address of every node, by node rank; empty if they are not known.
        host: the address of this node; empty if it is not known.

    Example: rank 3 of two nodes with two ranks each, hosts a and b, MASTER_ADDR a, MASTER_PORT 6170 ->
    PADDLE_TRAINER_ID 3, PADDLE_TRAINER_ENDPOINTS a:6170,a:6171,b:6170,b:6171, PADDLE_CURRENT_ENDPOINT b:6171.
    """
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    local_rank, local_size = int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"])
    port = int(environ["MASTER_PORT"])
    endpoints = [_endpoint(name, port + number) for name in hosts for number in range(local_size)]
    # A rank knows only the number of ranks on its own node. The list is right only if every node has as many.
    listed = len(endpoints) == size and int(environ["GROUP_RANK"]) * local_size + local_rank == rank
    variables = {  # None removes one
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(size),
        "PADDLE_CURRENT_ENDPOINT": _endpoint(host, port + local_rank) if host else None,
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints) if listed else None,
        "PADDLE_MASTER": _endpoint(environ["MASTER_ADDR"], port),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_GLOBAL_SIZE": str(size),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_LOCAL_SIZE": str(local_size),
        "PADDLE_NNODES": environ["GROUP_WORLD_SIZE"],
        "PADDLE_RANK_IN_NODE": str(local_rank),
        "PADDLE_DISTRI_BACKEND": None if gpus else "gloo",
        "FLAGS_selected_gpus": str(local_rank % gpus) if gpus else None,
    }
    for name, value in variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def exit_code_of(error: BaseException) -> int:
    """Return the exit code with which Python ends after this exception. 0 means that it is no failure."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1  # the system keeps eight bits


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as problem:  # of the user's __str__, which may raise anything
        return f"<str() of it raised {type(problem).__name__}>"


def record_exception(error: BaseException, path: str | None) -> None:
    """Record at `path`, if there is one, why this rank fails, in torchrun's format; and tell the other ranks.

    The record holds the whole texts. What reads it cuts them: `failure.shown`.
    """
    process_exit = sys.modules.get("dpfuse.liveness.process_exit")
    if process_exit is not None:
        process_exit.announce_error(error)  # to the other ranks
    if not path:
        return
    name, text = type(error).__name__, _text_of(error)
    now = time.time()
    # The exit code of the process, unless the launcher ends it first because a peer has failed.
    code = exit_code_of(error)
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    note = {
        "message": f"{name}: {text}" if text else name,
        "extraInfo": {"py_callstack": stack, "timestamp": str(int(now)), "seen": now, "exit_code": code},
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": note}, file)
    except OSError as problem:
        # A warning only: the user must see the exception itself.
        print(f"dpfuse: could not write {path}: {problem}", file=sys.stderr)


def end_within(seconds: float, code: int) -> None:
    """Make sure that this process, which has failed, ends with `code` within `seconds`.

    Otherwise a single thread or worker that does not end would keep the whole job running.
    """

    def end() -> None:
        time.sleep(seconds)
        print(f"dpfuse: pid {os.getpid()} failed, but did not end in {seconds:g} s; it ends now", file=sys.stderr)
        os._exit(code)

    threading.Thread(target=end, daemon=True, name="dpfuse-end").start()


def end_process(code: int = 0, *, forked: bool = False) -> NoReturn:
    """End this process with an exit code, after everything that Python does at its end.

    A fork does not run the exit functions of its parent, which for instance remove folders that the parent uses. Nor
    does it write what the parent's open files still buffer.

    Python's finalization is skipped: threads of libraries may still run then, and abort a rank whose work is done, or
    replace the exit code of a failed rank by a signal. The process group is destroyed first, but not after a failure:
    NCCL could wait for a collective that no peer joins.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does at its end
    process_exit = sys.modules.get("dpfuse.liveness.process_exit")
    if process_exit is not None:
        process_exit.announce_exit(code)
    if not forked:
        atexit._run_exitfuncs()
        _note_if_stopped(code)
    distributed = sys.modules.get("torch.distributed")
    if code == 0 and distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        # The stream is closed, or a pipe without a reader.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if not forked:
        writer = threading.Thread(target=_write_buffered, daemon=True)
        writer.start()
        writer.join(SECONDS_TO_WRITE)  # a thread that is stuck in such a file would hold it for ever
    os._exit(code)


def _write_buffered() -> None:
    """Write what open files of the program still buffer, as Python's finalization does; and C's own."""
    gc.unfreeze()  # else its objects are not listed
    files = [each for each in gc.get_objects() if issubclass(type(each), BUFFERED)]
    for file in sorted(files, key=lambda each: not isinstance(each, io.TextIOWrapper)):
        with contextlib.suppress(Exception):  # its code may be the program's, or another library's
            file.flush()
    ctypes.CDLL(None).fflush(None)


def _note_if_stopped(code: int) -> None:
    stopping = sys.modules.get("dpfuse.stopping.wish")
    record = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if code == 0 and record and stopping is not None and stopping.wish.told:
        from dpfuse.job.stopped import note_stopped

        note_stopped(record)


def _run_script(path: str) -> None:
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    # A real __main__ module, as under `python path`: runpy would remove it while threads still use it.
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


def _hide_interrupts() -> None:
    """Show no KeyboardInterrupt, and have one raised again where Python would drop it, such as in a hook of `fork`."""
    show, show_dropped = sys.excepthook, sys.unraisablehook

    def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            show(kind, error, trace)

    def dropped(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Later, since it would be dropped again here.
            again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            show_dropped(unraisable)

    sys.excepthook, sys.unraisablehook = raised, dropped


def _interrupt_children() -> None:
    """Pass Ctrl-C on to the processes of `multiprocessing` for whose end this one waits before it ends."""
    module = sys.modules.get("multiprocessing")
    for child in module.active_children() if module is not None else ():
        if not child.daemon:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)


def main() -> None:
    told, kind, target, *arguments = sys.argv[1:]
    launch = Launch(**json.loads(told))
    die_with_parent(launch.pid)
    keep_signals()
    if launch.one_log:
        os.dup2(1, 2)
    if not launch.shows_interrupts:
        _hide_interrupts()
    set_paddle_variables(os.environ, launch.gpus, launch.hosts, launch.host)
    record = os.environ.get("TORCHELASTIC_ERROR_FILE")
    sys.argv = [target, *arguments]
    # Python has put this file's folder first; the program expects its own folder there.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        script = os.path.realpath(target)
        folder = script if os.path.isdir(script) else os.path.dirname(script)
        sys.path[0] = os.getcwd() if kind == "module" else folder
    try:
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_script(target)
    except BaseException as error:
        code = exit_code_of(error)
        if code:
            error = error.with_traceback(_own_frames_removed(error))
            record_exception(error, record)
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted and launch.shows_interrupts:
                raise  # Python ends by SIGINT
            sys.last_value = error  # as Python does; what runs at exit sees that the program has failed
            if not isinstance(error, SystemExit):
                sys.excepthook(type(error), error, error.__traceback__)  # the program may have one of its own
            elif not isinstance(error.code, int):
                print(_text_of(error), file=sys.stderr)  # as Python does
            if interrupted:
                code = 128 + signal.SIGINT  # with torch, Python itself takes a second for it
            end_within(launch.seconds_to_end, code)
            if interrupted:
                _interrupt_children()
            end_process(code)
    end_process()


if __name__ == "__main__":
    main()
