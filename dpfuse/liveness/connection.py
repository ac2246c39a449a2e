"""A TCP connection that carries one short JSON value per line, and closes on anything else.

Does not know what the messages mean.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

__all__ = ["Connection", "ConnectionEndError"]

MAX_LINE = 16 << 10  # bytes
MAX_UNSENT = 256 << 10  # bytes kept for a peer that does not read; further messages are dropped
PIECE = 64 << 10


class ConnectionEndError(Exception):
    """The connection can no longer be used; the text says why."""

    def __init__(self, text: str, *, closed: bool) -> None:
        super().__init__(text)
        self.closed = closed  # whether the peer closed it: its process has ended, or it hung up


class Connection:
    """Sends and receives, and never blocks. It owns the connected socket from now on."""

    def __init__(self, connected: socket.socket, max_line: int = MAX_LINE) -> None:
        connected.setblocking(False)
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.max_line = max_line  # bytes of a line to receive
        self._received = bytearray()
        self._unsent = bytearray()

    def send(self, message: Any) -> None:
        """Send as much as the socket takes; the rest goes with the next call.

        Raises:
            ConnectionEndError: the connection is broken.
        """
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(self._unsent) + len(data) <= MAX_UNSENT:
            self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent[:PIECE])]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise _broken(error) from error

    def receive(self) -> list[Any]:
        """Return the values that have arrived.

        Raises:
            ConnectionEndError: the connection is broken or closed, or the data is not short JSON.
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
                return self._last(messages, ConnectionEndError("the connection was closed", closed=True))
            self._received += data
            *lines, rest = self._received.split(b"\n")
            self._received = bytearray(rest)
            if max(map(len, (*lines, rest))) > self.max_line:
                raise ConnectionEndError(f"a line is longer than {self.max_line} bytes", closed=False)
            for line in lines:
                messages.append(_parsed(bytes(line)))
            if len(messages) > 1000:
                return messages  # the next call reads the rest

    def close(self) -> None:
        """Close the socket; unsent data is lost."""
        self.socket.close()

    def _last(self, messages: list[Any], error: ConnectionEndError) -> list[Any]:
        # Messages from before the end count. The next call meets the end again.
        if messages:
            return messages
        raise error


def _parsed(line: bytes) -> Any:
    if line.count(b"[") + line.count(b"{") > 1000:
        raise ConnectionEndError("a line is nested too deeply", closed=False)
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionEndError(f"a line is not JSON: {error}", closed=False) from error


def _broken(error: OSError) -> ConnectionEndError:
    # A peer that hung up resets the connection. Any other fault, such as a cable that was pulled, says nothing about
    # the peer.
    return ConnectionEndError(str(error), closed=isinstance(error, (ConnectionResetError, BrokenPipeError)))
