"""The machines of a job, as Paddle's flags describe them.

Owns `--master --rank`, and `--ips --node_ip --started_port`; and the variables that stand for flags. Starts nothing.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dpfuse.job.interfaces import address_towards, interface_addresses, is_own_address

__all__ = ["MASTER_PORT", "STARTED_PORT", "Nodes", "read_nodes", "take_variables"]

MASTER_PORT = 29500  # torchrun's default
STARTED_PORT = 6170  # the default of Paddle's older launchers

# The ways to describe the machines of a job: the flag that is required, and all flags of this way.
WAYS = {"--master": ("master", "rank"), "--ips": ("ips", "node_ip", "started_port")}
TORCHRUNS_WAY = ("standalone", "rdzv_backend", "rdzv_endpoint", "node_rank", "master_addr", "master_port")


@dataclass(frozen=True)
class Nodes:
    """The machines of one job, and the number of this machine."""

    count: str  # as torchrun's --nnodes: "2", or "2:4" if machines may join and leave
    host: str  # the address at which they connect
    port: int | None  # None means any free port, since all ranks are on this machine
    rank: int | None = None  # of this machine; None if torchrun assigns the numbers
    addresses: tuple[str, ...] = ()  # of each machine by rank, if the command line lists them
    local_address: str | None = None  # of this machine, if the command line gives it

    @property
    def several(self) -> bool:
        """Whether the job has, or may have, more than one machine."""
        return self.count not in ("1", "1:1")

    @property
    def own_address(self) -> str | None:
        """The address of this machine in the job; None if it is unknown."""
        if self.addresses and self.rank is not None:
            return self.addresses[self.rank]
        if self.local_address is not None:
            return self.local_address
        own = address_towards(self.host, self.port or MASTER_PORT)
        # On many machines the own host name resolves to a loopback address, which other machines cannot use.
        useless = own is not None and _is_loopback(own) and not _is_loopback(self.host)
        return None if useless else own

    @property
    def serves(self) -> bool | None:
        """Whether this machine is the one at `host`; None if torchrun must decide by host names.

        By host names alone torchrun finds no machine that serves if a machine's name is a loopback address.
        """
        if _is_loopback(self.host):
            return None  # several launchers on this machine: the first one serves, as torchrun decides
        if is_own_address(self.host):
            return True
        return False if _is_address(self.host) else None

    @property
    def doubt(self) -> str:
        """Say that the command line gives this machine an address that it does not have; empty if all is well.

        It is no error: behind address translation, a machine does not know its own address.
        """
        if not self.addresses or self.rank is None or is_own_address(self.addresses[self.rank]):
            return ""
        return (
            f"--node_ip: got {self.addresses[self.rank]}, which is no address of this machine, which has "
            f"{_own_addresses()}; expected one of these. If two machines give the same --node_ip, the job waits until "
            "its time-out. Correct it, unless the address is translated on its way to this machine."
        )


def _own_addresses() -> str:
    return ", ".join(f"{address} ({name})" for name, address in interface_addresses().items()) or "none"


def read_nodes(args: argparse.Namespace, given: set[str]) -> Nodes | None:
    """Return the machines of the job that Paddle's flags describe; None if none of these flags is used.

    Args:
        args: the parsed command line.
        given: the names in `args` that the user wrote.

    Raises:
        ValueError: flags contradict each other, a flag is missing, a value makes no sense, or this machine does not
            find itself among the addresses.
    """
    smallest, largest = _node_range(args.nnodes)
    written = {way: [f"--{flag}" for flag in flags if flag in given] for way, flags in WAYS.items()}
    used = [way for way, flags in written.items() if flags]
    if not used:
        return None
    if len(used) > 1:
        first, second = (" ".join(written[way]) for way in used[:2])
        raise ValueError(
            f"{first} and {second} are of two ways to describe the machines of a job; use one of them: --master "
            "host:port, or --ips with --started_port"
        )
    torchruns = [name for name in TORCHRUNS_WAY if name in given]
    if torchruns:
        raise ValueError(
            f"{used[0]} cannot be mixed with --{torchruns[0]}, which is torchrun's way to describe the machines of a "
            "job; use one of them"
        )
    if used == ["--master"]:
        return _by_master(args, given, smallest, largest)
    return _by_addresses(args, given)


def take_variables(args: argparse.Namespace, given: set[str], environ: Mapping[str, str]) -> set[str]:
    """Take the machines of the job from Paddle's variables, if no flag describes them; return the names in `args`.

    A rank has these variables, too: a launcher that it starts has a job of its own.

    Raises:
        ValueError: there are several machines, and no address of node 0.
    """
    count = environ.get("PADDLE_NNODES", "")
    flags = {"nnodes", *TORCHRUNS_WAY, *(flag for flags in WAYS.values() for flag in flags)}
    if count in ("", "1", "1:1") or given & flags or "LOCAL_RANK" in environ:
        return set()
    args.nnodes, args.master = count, environ.get("PADDLE_MASTER")
    if not args.master:
        raise ValueError(
            f"PADDLE_NNODES: got {count!r}, but neither PADDLE_MASTER nor flags; expected the address of node 0 as "
            "well: PADDLE_MASTER=host:port. Unset PADDLE_NNODES if this machine is the only one."
        )
    rank = environ.get("PADDLE_RANK", "")
    if rank in ("", "-1"):  # which is Paddle's own default
        return {"nnodes", "master"}
    if not rank.isdecimal():
        raise ValueError(f"PADDLE_RANK: got {rank!r}, expected the number of this machine, from 0")
    args.rank = int(rank)
    return {"nnodes", "master", "rank"}


def _node_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    smallest = int(match[1]) if match else 0
    largest = int(match[2] or match[1]) if match else 0
    if not 1 <= smallest <= largest:
        raise ValueError(f"--nnodes: got {text!r}, expected a number of machines from 1 on, or a range such as 2:4")
    return smallest, largest


def _by_master(args: argparse.Namespace, given: set[str], smallest: int, largest: int) -> Nodes:
    if args.master is None:
        raise ValueError(
            f"--rank: got {args.rank}, but no --master; expected the address of node 0 as well: "
            "--master host:port --nnodes N"
        )
    host, port = _host_and_port(args.master)
    if largest == 1 and "nnodes" not in given:
        raise ValueError(
            f"--master: got {args.master!r}, but --nnodes is missing; expected the number of machines as well. "
            "Leave --master out if this is the only one."
        )
    rank = None if args.rank == -1 else args.rank  # -1 is Paddle's own default
    if rank is not None and smallest != largest:
        raise ValueError(
            f"--rank: got {rank} with --nnodes {args.nnodes}; machines that join and leave get their numbers by "
            "themselves. Leave --rank out, or give one number of machines."
        )
    if rank is not None and not 0 <= rank < largest:
        raise ValueError(f"--rank: got {rank}, expected 0 to {largest - 1}, since --nnodes is {largest}")
    return Nodes(args.nnodes, host, port or MASTER_PORT, rank, local_address=args.local_addr)


def _by_addresses(args: argparse.Namespace, given: set[str]) -> Nodes:
    if args.ips is None:
        name = "node_ip" if "node_ip" in given else "started_port"
        raise ValueError(
            f"--{name}: got {getattr(args, name)}, but no --ips; expected the addresses of all machines as well: "
            "--ips=10.0.0.1,10.0.0.2"
        )
    addresses = tuple(_address(part, "--ips") for part in args.ips.split(","))
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ValueError(f"--ips: {', '.join(twice)} is named twice in {args.ips!r}; name each machine once")
    if "nnodes" in given and args.nnodes not in (str(len(addresses)), f"{len(addresses)}:{len(addresses)}"):
        raise ValueError(
            f"--ips names {len(addresses)} machine(s), but --nnodes is {args.nnodes}; expected the same number. "
            "Leave --nnodes out."
        )
    port = None if args.started_port is None else _port(args.started_port, "--started_port")
    if len(addresses) > 1:
        port = port or STARTED_PORT
    return Nodes(str(len(addresses)), addresses[0], port, _position(args, addresses), addresses)


def _position(args: argparse.Namespace, addresses: tuple[str, ...]) -> int:
    """Return the rank of this machine, which is the one at `--node_ip`; without that it finds itself."""
    if args.node_ip is not None:
        own = _address(args.node_ip, "--node_ip")
        if own not in addresses:
            raise ValueError(f"--node_ip: got {own}, expected one of --ips={args.ips}")
        return addresses.index(own)
    found = [address for address in addresses if is_own_address(address)]
    if len(found) == 1:
        return addresses.index(found[0])
    if found:
        wrong = f"of which {', '.join(found)} are all addresses of this machine; expected one. Say"
    else:
        wrong = (
            f"but none of them is an address of this machine, which has {_own_addresses()}. Correct the list, or say"
        )
    raise ValueError(f"--ips: got {args.ips}, {wrong} which one this machine is: --node_ip=…")


def _host_and_port(text: str) -> tuple[str, int | None]:
    """Return host and port of "10.0.0.1:29500", a host alone, or "[::1]:29500"; Paddle's http:// may come first."""
    place = text.removeprefix("http://").rstrip("/")
    if _is_address(place):
        return place, None  # an IPv6 address has colons of its own
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+)(?::([^/:]*))?", place)
    if not match:
        raise ValueError(
            f"--master: got {text!r}, expected host:port of node 0, such as 10.0.0.1:29500 (no other service, such "
            "as etcd, is needed)"
        )
    return match[1].strip("[]"), None if match[2] is None else _port(match[2], "--master")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _address(text: str, flag: str) -> str:
    address = ipaddress.ip_address(text.strip()) if _is_address(text.strip()) else None
    if address is None or address.is_unspecified or address.is_multicast:
        raise ValueError(f"{flag}: got {text.strip()!r}, expected the IP address of a machine, such as 10.0.0.1")
    return str(address)


def _port(text: str, flag: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"{flag}: got port {text!r}, expected a number from 1 to 65535")
    return int(text)
