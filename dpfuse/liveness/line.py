"""A TCP connection that carries one short JSON value per line, and closes on anything else. Knows no meaning."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

__all__ = ["Line", "LineError"]

MAX_LINE = 16 << 10  # bytes
MAX_UNSENT = 256 << 10  # bytes that wait for a peer that does not read; what comes then is dropped
PIECE = 64 << 10


class LineError(Exception):
    """The connection is of no more use; the text says why."""

    def __init__(self, text: str, *, closed: bool) -> None:
        super().__init__(text)
        self.closed = closed  # whether the peer's end is closed: its process is gone, or has hung up


class Line:
    """Sends and receives without ever waiting.

    Args:
        connected: a connected socket, which is the line's from now on.
        max_line: bytes of a line to receive.
    """

    def __init__(self, connected: socket.socket, max_line: int = MAX_LINE) -> None:
        connected.setblocking(False)
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.max_line = max_line
        self._received = bytearray()
        self._unsent = bytearray()

    def send(self, message: Any) -> None:
        """Send as much as can be; the rest goes with the next call.

        Raises:
            LineError: the connection is broken.
        """
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(self._unsent) + len(data) <= MAX_UNSENT:
            self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send what is left."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent[:PIECE])]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise _broken(error) from error

    def receive(self) -> list[Any]:
        """The values that have come.

        Raises:
            LineError: the connection is broken or closed, or what came is no short JSON.
        """
        messages: list[Any] = []
        while True:
            try:
                data = self.socket.recv(PIECE)
            except (BlockingIOError, InterruptedError):
                return messages
            except OSError as error:
                return self._last(messages, _broken(error))
            if not data:
                return self._last(messages, LineError("the connection was closed", closed=True))
            self._received += data
            *lines, rest = self._received.split(b"\n")
            self._received = bytearray(rest)
            if max(map(len, (*lines, rest))) > self.max_line:
                raise LineError(f"a line is longer than {self.max_line} bytes", closed=False)
            for line in lines:
                messages.append(_parsed(bytes(line)))
            if len(messages) > 1000:
                return messages  # the rest is still there when the caller has seen to these

    def close(self) -> None:
        """Hang up; what is not sent is lost."""
        self.socket.close()

    def _last(self, messages: list[Any], error: LineError) -> list[Any]:
        # What came before the end counts; the end itself is seen again by the next call.
        if messages:
            return messages
        raise error


def _parsed(line: bytes) -> Any:
    if line.count(b"[") + line.count(b"{") > 1000:
        raise LineError("a line is too deep", closed=False)
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"a line is no JSON: {error}", closed=False) from error


def _broken(error: OSError) -> LineError:
    # A peer that hung up resets the connection. Whatever else can happen to it, such as a cable that was pulled, says
    # nothing about the peer.
    return LineError(str(error), closed=isinstance(error, (ConnectionResetError, BrokenPipeError)))
