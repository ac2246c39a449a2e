"""Python processes that need not import torch, because they are forks of a process that has imported it.

Importing torch takes seconds of processor time, which most tests that start a program do not ask about. `warm_python()`
gives the command that stands for `python`: a small program that has the server fork a process, hands it its own files,
environment and folder, passes signals on to it, and ends as it ends. A process started so has another id than the
program that stands for it, and does not end when that one's parent does.

A process is a usual one, with all of torch to import, where it could differ: after options of Python that are not
known here, and where a variable is set that Python or torch reads early. So is one in which `dpfuse.startup` has a
module act behind `import torch`; where WARM_STARTUP is set, that module acts in a fork, before the program. Standard
output is UTF-8 in any case. At its end it does all that Python does, but does not take its modules apart, which takes
as long as most programs.

Where the variable PYTHON_EXEC is that command, the processes of a job are warm, too: torchrun starts ranks with it, and
`multiprocessing` is told to do so.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import subprocess

# How names of variables begin that are read early, and how those begin that are seen to here, or are read late. Those
# of KMP are of Intel's OpenMP, which torch has not on Linux: sklearn sets them in a process of tests that imports it.
# Lightning sets the last one there, and torch reads it when it looks for GPUs.
EARLY = ("PYTHON", "TORCH_", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "OPENBLAS_", "LD_")
OTHERS = ("PYTHONIOENCODING", "PYTHON_EXEC", "OMP_NUM_THREADS", "TORCH_NCCL_", "PYTORCH_NVML_")
OPTIONS = ("-u", "-B")  # of Python, that are known here
FILES = 64  # to hand over, at most
STARTUP = "WARM_STARTUP"
AT_STARTUP = os.path.join("dpfuse", "at_startup")  # the end of the folder that is in PYTHONPATH then

USUAL = "torch.distributed.run"  # what the launcher needs

_at_import = dict(os.environ)  # before any test
_servers: dict[str, tuple[subprocess.Popen[bytes], str]] = {}


def warm_python(preload: str = USUAL) -> str:
    """Return the path of the command that stands for `python`.

    Args:
        preload: a module that the server imports beside torch and dpfuse. The first call with a name starts a server,
            which ends with this process. Each but the usual one is a fork of that one, and need not import torch.
    """
    if preload not in _servers:
        python = sys.executable if preload == USUAL else warm_python()
        _servers[preload] = _start_server(python, preload)
    return _servers[preload][1]


def _start_server(python: str, preload: str) -> tuple[subprocess.Popen[bytes], str]:
    import atexit
    import subprocess
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="dpfuse-warm-")
    path, command = (os.path.join(folder.name, name) for name in ("socket", "python"))
    process = subprocess.Popen(
        [python, "-m", "tests.warm", "serve", path, preload],
        env=_usual_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the server of warm processes has not started"
    with open(command, "w") as file:
        words = [sys.executable, "-I", "-S", os.path.abspath(__file__), "ask", path]
        file.write(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    os.chmod(command, 0o700)

    def end() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    return process, command


def _usual_environment() -> dict[str, str]:
    """Return the variables of a server: without what the test that is the first to need one has set for itself.

    No process of any other test could be forked from a server that has begun with it.
    """
    from tests.distributed.processes import clean_environment

    now = clean_environment(PYTHONIOENCODING="utf-8")
    own = _early(now)
    others = {name: value for name, value in now.items() if name not in own}
    return others | _early(_at_import) | {"PYTHONPATH": now["PYTHONPATH"]}


def _early(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables of which a fork would not know that they have changed."""
    found = {
        name: value for name, value in environment.items() if name.startswith(EARLY) and not name.startswith(OTHERS)
    }
    if STARTUP in environment and "PYTHONPATH" in found:
        paths = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(path for path in paths if not path.endswith(AT_STARTUP))
    return found


def ask(path: str, words: list[str]) -> None:
    """Let the server at `path` run Python with these words; end as it ends."""
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if _is_open(file)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(path)
        request = json.dumps([words, dict(os.environ), os.getcwd(), os.getppid(), files]).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], files)
        server.sendall(request)
        answer = server.makefile("rb")
        process = int(answer.readline())
        if process == 0:
            os.execv(sys.executable, [sys.executable, *words])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(process, number))
        for file in files:
            os.close(file)  # a reader at the other end shall see that the process has closed it
        status = int(answer.readline())
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:  # which nothing handles
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:  # it was the list of the open files itself
        return False
    return True


class Request(NamedTuple):
    """What a client asks for: the words after `python`, and in what surroundings."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    parent: int  # of the client
    numbers: list[int]  # of its open files
    files: list[int]  # the same files here

    @staticmethod
    def received(client: socket.socket) -> Request:
        length, files, _, _ = socket.recv_fds(client, 4, FILES)
        try:
            with client.makefile("rb") as stream:
                return Request(*json.loads(stream.read(int.from_bytes(length, "big"))), files)
        except (OSError, ValueError):
            for file in files:
                os.close(file)
            raise

    @property
    def program(self) -> list[str]:
        """The words after those options that are known."""
        words = list(self.words)
        while words and words[0] in OPTIONS:
            del words[0]
        return words

    def can_be_forked(self, own: dict[str, str]) -> bool:
        """Whether a fork of a process that was started with the variables `own` does what a usual process does."""
        usual = not self.program[0].startswith("-") or self.program[0] in ("-c", "-m")
        return usual and _early(self.environment) == _early(own)

    def put_on(self, own: dict[str, str]) -> None:
        """Make these the surroundings of this process; what imports have put into the environment stays."""
        import fcntl
        import multiprocessing
        import tempfile
        from io import TextIOWrapper

        high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 100) for file in self.files]
        for file in self.files:
            os.close(file)
        for file, number in zip(high, self.numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        imported = {name: value for name, value in os.environ.items() if own.get(name) != value}
        os.environ.clear()
        os.environ.update({**imported, **self.environment})
        os.chdir(self.folder)
        tempfile.tempdir = None  # which may be another one here
        me, parent, getppid = os.getpid(), self.parent, os.getppid
        os.getppid = lambda: parent if os.getpid() == me else getppid()  # not the server
        if "-u" in self.words:
            for name in ("stdout", "stderr"):
                raw = open(getattr(sys, name).fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
                stream = TextIOWrapper(raw, "utf-8", getattr(sys, name).errors, write_through=True)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
        if "PYTHON_EXEC" in self.environment:
            multiprocessing.set_executable(self.environment["PYTHON_EXEC"])


def serve(path: str, own: dict[str, str]) -> Request:
    """Fork a process for each request; return, in such a process, the request.

    Args:
        path: of the socket.
        own: the variables that the server was started with.
    """
    import gc
    import selectors
    from contextlib import suppress

    clients: dict[int, socket.socket] = {}  # by process
    waker, woken = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    selector = selectors.DefaultSelector()
    for end in (waker, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener.bind(path)
    listener.listen(64)
    for source in (sys.stdin, woken, listener):
        selector.register(source, selectors.EVENT_READ)
    gc.collect()
    gc.freeze()  # the first collection in a fork would copy every page
    os.write(1, b"ready\n")
    while True:
        sources = [key.fileobj for key, _ in selector.select()]
        if sys.stdin in sources:  # closed: the tests have ended
            for process in clients:
                os.kill(process, signal.SIGKILL)
            os._exit(0)
        if woken in sources:
            woken.recv(4096)  # before the look at the processes: one that ends after it shall wake us again
        for process, client in list(clients.items()):
            if client in sources:  # closed: whoever asked was killed
                os.kill(process, signal.SIGKILL)
            ended, status = os.waitpid(process, 0 if client in sources else os.WNOHANG)
            if ended:
                del clients[process]
                selector.unregister(client)
                with suppress(OSError):
                    client.sendall(b"%d\n" % status)
                client.close()
        if listener in sources:
            client, _ = listener.accept()
            try:
                request = Request.received(client)
            except (OSError, ValueError):  # a test has killed the client before it had asked
                client.close()
                continue
            process = os.fork() if request.can_be_forked(own) else -1
            if process == 0:
                break
            with suppress(OSError):  # it was killed since; the next look at the clients finds it closed
                client.sendall(b"%d\n" % max(process, 0))
            for file in request.files:
                os.close(file)
            if process > 0:
                clients[process] = client
                selector.register(client, selectors.EVENT_READ)
            else:
                client.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # As in a new Python, also where the tests ignore Ctrl-C because a shell has started them in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the server may be under `nohup`
    selector.close()
    for connection in (waker, woken, listener, client, *clients.values()):
        connection.close()
    request.put_on(own)
    return request


def run(words: list[str]) -> int:
    """Do what Python does with its command line; return the exit code, or the signal to end by as a negative number."""
    import runpy
    from types import ModuleType

    sys.modules["__main__"] = main = ModuleType("__main__")
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path[0] = os.getcwd()
            runpy._run_module_as_main(words[1])  # pdb and others call it as well
            return 0
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path[0] = ""
            code = compile(words[1], "<string>", "exec", dont_inherit=True)
        else:
            sys.argv = words
            sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
            main.__file__ = os.path.abspath(words[0])
            with open(words[0], "rb") as file:
                code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
            return 1
        return (end.code or 0) & 0xFF
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace and trace.tb_next  # without the frame of this file
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _main() -> None:
    role, path, *words = sys.argv[1:]
    if role == "ask":
        ask(path, words)
    own = dict(os.environ)
    import atexit
    import threading
    from contextlib import suppress
    from importlib import import_module

    import numpy
    import torch

    _ = import_module("dpfuse").DataParallel  # the first use of a name imports all of dpfuse
    for name in ("torch._dynamo", words[0]):  # the first takes as long as torch, and optimizers import it
        import_module(name)
    request = serve(path, own)
    numpy.random.seed()
    torch.seed()  # at random, as a process of its own begins
    if "OMP_NUM_THREADS" in request.environment:
        torch.set_num_threads(int(request.environment["OMP_NUM_THREADS"]))
    if STARTUP in request.environment and request.environment.get("DPFUSE_STARTUP"):
        import_module(request.environment["DPFUSE_STARTUP"]).start()
    code = run(request.program)
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe that nothing reads any more
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _main()
