"""The environment variables of a rank: its number, the number of ranks, the address of the store. Joins nothing.

`read_environment` turns the variables into a `RankEnvironment`, or raises an error that names one of them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = [
    "LOOPBACK_HOSTS",
    "RankEnvironment",
    "endpoints_of",
    "environment",
    "one_machine_variables",
    "read_environment",
]

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class RankEnvironment:
    """The variables of one process, checked."""

    rank: int
    world_size: int
    local_rank: int
    device_id: int  # index among the visible GPUs
    master: tuple[str, int] | None  # host and port of the store; None only in a job of one rank
    one_machine: bool


def read_environment() -> RankEnvironment | None:
    """Return what torch's variables say, else what Paddle's say; None if neither are set.

    Raises:
        ValueError: a variable is missing or wrong.
    """
    environ = os.environ
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _read(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", _torch_master(environ))
    if any(name in environ for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")):
        master = _torch_master(environ) or _paddle_master(environ)
        return _read(environ, "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_LOCAL_RANK", master)
    return None


def _read(
    environ: Mapping[str, str],
    rank_name: str,
    size_name: str,
    local_name: str,
    master: tuple[str, int] | None,
) -> RankEnvironment:
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if name not in environ:
            present = other if other in environ else local_name
            raise ValueError(
                f"{name} is not set although {present}={environ[present]!r} is; expected both {rank_name} "
                f"and {size_name}. Start the ranks with `python -m dpfuse.launch`, or set both."
            )
    world_size = _integer(environ, size_name, 1, None, "the number of ranks in the job")
    rank = _integer(environ, rank_name, 0, world_size, f"less than {size_name}={world_size}")
    local_rank = (
        _integer(environ, local_name, 0, None, "the rank's number on its machine")
        if (local_name in environ)
        else _local_rank(environ, rank)
    )
    device_id = local_rank
    if size_name == "PADDLE_TRAINERS_NUM" and environ.get("FLAGS_selected_gpus"):
        device_id = _integer(environ, "FLAGS_selected_gpus", 0, None, "the index of one visible GPU")
    if master is None and world_size > 1:
        raise ValueError(
            f"MASTER_ADDR and MASTER_PORT are not set although {size_name}={world_size}; expected the "
            "address to which the ranks connect. Set both (on one machine MASTER_ADDR=127.0.0.1 and a free port), or "
            "PADDLE_MASTER=host:port, or start the ranks with `python -m dpfuse.launch`."
        )
    endpoints = trainer_endpoints(environ)
    if size_name == "PADDLE_TRAINERS_NUM" and endpoints and len(endpoints) != world_size:
        raise ValueError(
            f"PADDLE_TRAINER_ENDPOINTS names {len(endpoints)} addresses, expected "
            f"PADDLE_TRAINERS_NUM={world_size}. Give one host:port for each rank."
        )
    one_machine = (
        world_size == 1
        or environ.get("LOCAL_WORLD_SIZE") == str(world_size)
        or (master is not None and master[0] in LOOPBACK_HOSTS)
    )
    return RankEnvironment(rank, world_size, local_rank, device_id, master, one_machine)


def _integer(environ: Mapping[str, str], name: str, least: int, below: int | None, meaning: str) -> int:
    text = environ[name]
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (below is not None and value >= below):
        raise ValueError(
            f"{name}: got {text!r}, expected an integer of at least {least} ({meaning}). "
            "Correct the variable, or start the ranks with `python -m dpfuse.launch`, which sets it."
        )
    return value


def _torch_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host and not port:
        return None
    if not host or not port:
        missing, present = ("MASTER_ADDR", "MASTER_PORT") if not host else ("MASTER_PORT", "MASTER_ADDR")
        raise ValueError(
            f"{missing} is not set although {present}={environ[present]!r} is; expected both. "
            "Set both, or start the ranks with `python -m dpfuse.launch`."
        )
    return host, _integer(environ, "MASTER_PORT", 1, 65536, "a port below 65536")


def _paddle_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    # Paddle's rank 0 serves the store. Without PADDLE_MASTER all ranks know the address from the list of endpoints.
    name = "PADDLE_MASTER" if environ.get("PADDLE_MASTER") else "PADDLE_TRAINER_ENDPOINTS"
    address = environ.get("PADDLE_MASTER") or next(iter(trainer_endpoints(environ)), None)
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{name}: got {address!r}, expected host:port. Correct the variable.")
    return host.strip("[]"), int(port)


def trainer_endpoints(environ: Mapping[str, str]) -> list[str]:
    """Return the addresses in PADDLE_TRAINER_ENDPOINTS, by rank; an empty list if it is not set."""
    return [part.strip() for part in environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if part.strip()]


def endpoints_of(environ: Mapping[str, str], rank: int, world_size: int) -> tuple[list[str], str]:
    """Return the addresses of all ranks, and that of `rank`; empty if Paddle's variables describe another job.

    A launcher that sets only torch's variables does not remove Paddle's variables of a surrounding job.
    """
    about = (environ.get("PADDLE_TRAINER_ID", str(rank)), environ.get("PADDLE_TRAINERS_NUM", str(world_size)))
    if about != (str(rank), str(world_size)):
        return [], ""
    endpoints = trainer_endpoints(environ)
    return endpoints, environ.get("PADDLE_CURRENT_ENDPOINT") or "".join(endpoints[rank : rank + 1])


def _local_rank(environ: Mapping[str, str], rank: int) -> int:
    # With endpoints, the number of earlier ranks on this rank's host. Without, all ranks are on one machine.
    hosts = [endpoint.rpartition(":")[0] for endpoint in trainer_endpoints(environ)]
    return hosts[:rank].count(hosts[rank]) if rank < len(hosts) else rank


def one_machine_variables() -> dict[str, str]:
    """Return the variables that keep the sockets of gloo and NCCL on loopback, except those that the user has set."""
    if "lo" not in (name for _, name in socket.if_nameindex()):  # its name on Linux
        return {}
    return {name: "lo" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, so that processes started there inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
