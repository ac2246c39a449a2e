"""`python -m tests.pretended_gpu.fail_a_call WAY CALL AFTER`: prints the errors of two steps; the first fails.

Before these it prints whether the first step has made the call.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from tests.pretended_gpu.device import counted, fail
from tests.pretended_gpu.ways import SETTLED, WAYS


def main(way: str, call: str, after: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2, device_id=device)
    step = WAYS[way].run()
    for _ in range(SETTLED):
        step()
    fail(call, int(after))
    errors, made = [], []
    for _ in range(2):
        with counted() as found:
            try:
                step()
                torch.cuda.synchronize()
                errors.append("")
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        made.append(sum(count for name, count in found.items() if name.startswith(call)) >= int(after))
    print(json.dumps([made[0], *errors]), flush=True)
    os._exit(0)  # nothing can be freed on a device that has failed


if __name__ == "__main__":
    main(*sys.argv[1:])
