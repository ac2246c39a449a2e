"""What the server that the ranks are forked from imports beside dpfuse: what tests of ranks use sooner or later.

Each of these takes a rank up to a second, and there are four pools of ranks.
"""

from __future__ import annotations

import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.distributed.checkpoint.state_dict
import torch.distributed.optim
import torch.distributed.tensor.parallel.ddp
import torch.utils.checkpoint
import torch.utils.data  # noqa: F401
