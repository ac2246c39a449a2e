"""Imports torchvision, also where torch has no CUDA: there its library of operators can't be loaded.

Then two names of operators are missing, and the import ends with an error. No program here calls one of them.
"""

import torch

__all__ = ["torchvision"]

try:
    import torchvision
except RuntimeError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision
