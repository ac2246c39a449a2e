"""The rendezvous of ranks on one machine: a store that listens on 127.0.0.1 only.

torch's own TCPStore listens on every interface, whatever its address, unless it gets a socket that is already bound.
Imported only when a job starts, because `import torch` does not import torchrun's rendezvous package.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["BACKEND", "HOST", "LoopbackRendezvous", "loopback_store", "register"]

BACKEND = "dpfuse-loopback"
HOST = "127.0.0.1"


def loopback_store(port: int = 0, timeout: timedelta = timedelta(minutes=15)) -> TCPStore:
    """Return a store that only processes of this machine can reach; its `port` attribute is the port.

    Args:
        port: the port to listen on; 0 takes a free one.
        timeout: of a read that waits for a key.

    Raises:
        ValueError: the port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Allows a port of which old connections, of a job that has just ended, still exist.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"port {port} of {HOST} cannot be used: {error.strerror}. Give another port, or none to get a free one."
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(
        HOST,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns and closes it from now on
    )


class LoopbackRendezvous(RendezvousHandler):
    """torchrun's rendezvous for a job whose ranks are all on this machine: it waits for no other machine."""

    def __init__(self, run_id: str, port: int, timeout: timedelta) -> None:
        self._run_id = run_id
        self._port = port
        self._timeout = timeout
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        # The ranks connect to the launcher's store; otherwise rank 0 would serve a store on every interface.
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        # A restarted job gets a new store, because the old one has keys of the failed attempt. Nothing else holds the
        # old one, so it stops to listen here, and the new one can have its port.
        self._store = None
        self._store = loopback_store(self._port, self._timeout)
        # torchrun keeps what it gets for longer. On one machine it talks to itself alone.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(HOST, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    port = int(parameters.endpoint.rpartition(":")[2])
    timeout = timedelta(seconds=float(parameters.get("timeout", 900)))
    return LoopbackRendezvous(parameters.run_id, port, timeout)


def register() -> None:
    """Register `BACKEND` with torchrun; may be called several times."""
    rendezvous_handler_registry.register(BACKEND, _create)
