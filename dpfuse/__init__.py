"""dpfuse: data-parallel gradient averaging for PyTorch through fused buckets."""

from dpfuse.errors import DPFuseError
from dpfuse.plan import Bucket, BucketPlan, ParamSpec, plan_buckets

__version__ = "0.1.0"
__all__ = [
    "Bucket",
    "BucketPlan",
    "DPFuseError",
    "ParamSpec",
    "__version__",
    "plan_buckets",
]
