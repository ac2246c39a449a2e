"""dpfuse: data-parallel gradient averaging for PyTorch through fused buckets."""

from dpfuse.errors import DPFuseError

__version__ = "0.1.0"
__all__ = ["DPFuseError", "__version__"]
