"""What a launcher says while it waits for the other machines of its job. Imported only when a job starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

__all__ = ["tells_while_waiting"]

SECONDS = 10.0  # between two lines
GIVES_UP = {"static": ("timeout", 900), "c10d": ("join_timeout", 600)}  # torchrun's settings, and its defaults


@contextmanager
def tells_while_waiting(
    say: Callable[[str], None], place: str, count: str, backend: str, settings: dict[str, Any], every: float = SECONDS
) -> Iterator[None]:
    """Say every few seconds that the machines of the job have not met, while that is so.

    Args:
        say: prints a line.
        place: where the machines meet, host:port.
        count: of the machines, as torchrun's --nnodes.
        backend: torchrun's rendezvous, "static" or "c10d".
        settings: torchrun's --rdzv_conf.
        every: seconds between two lines.
    """
    meet = SimpleElasticAgent._rendezvous
    name, default = GIVES_UP.get(backend, ("timeout", 900))
    limit = float(settings.get(name, default))

    def tell(met: Event) -> None:
        waited = 0.0
        while not met.wait(every):
            waited += every
            say(
                f"this machine has waited {waited:g} s for the others: the job needs {count} machines, which meet at "
                f"{place}. It gives up after {limit:g} s (--rdzv_conf={name}=…). Start the launcher on each machine, "
                "with the same address and port, and look at the firewalls."
            )

    def meet_and_tell(self: SimpleElasticAgent, *args: Any, **kwargs: Any) -> None:
        met = Event()
        teller = Thread(target=tell, args=(met,), name="dpfuse-meeting", daemon=True)
        teller.start()
        try:
            meet(self, *args, **kwargs)
        finally:
            met.set()
            teller.join()

    with patch.object(SimpleElasticAgent, "_rendezvous", meet_and_tell):
        yield
