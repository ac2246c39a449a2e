"""The fields of Paddle's DistributedStrategy with their defaults. Data only; `strategy` knows their meaning."""

from __future__ import annotations

from typing import Any

__all__ = ["INSTEAD", "SUPPORTED", "UNSUPPORTED"]

SUPPORTED: dict[str, Any] = {
    "a_sync": True,
    "fuse_grad_size_in_MB": 32,
    "last_comm_group_size_MB": 1.0,
    "find_unused_parameters": False,
    "fuse_all_reduce_ops": True,
    "fp16_allreduce": False,
    "sync_batch_norm": False,
    "gradient_merge": False,
    "gradient_merge_configs": {"k_steps": 1, "avg": True},
    "gradient_scale_configs": {"scale_strategy": "avg", "scale_gradient": False},
    "hybrid_configs": {
        "dp_degree": -1,
        "mp_degree": 1,
        "pp_degree": 1,
        "sharding_degree": 1,
        "sep_degree": 1,
        "cp_degree": 1,
    },
}

# The settings of what is not here (`…_configs`) have no keys: each of them would be refused.
UNSUPPORTED: dict[str, Any] = {
    "a_sync_configs": {},
    "adam_d2sum": False,
    "adaptive_localsgd": False,
    "adaptive_localsgd_configs": {},
    "amp": False,
    "amp_configs": {},
    "asp": False,
    "auto": False,
    "auto_search": False,
    "build_strategy": None,
    "conv_workspace_size_limit": 512,
    "cudnn_batchnorm_spatial_persistent": False,
    "cudnn_exhaustive_search": False,
    "dgc": False,
    "dgc_configs": {},
    "elastic": False,
    "execution_strategy": None,
    "fs_client_param": None,
    "fuse_grad_merge": False,
    "fuse_grad_size_in_num": 8,
    "heter_ccl_mode": False,
    "hierarchical_allreduce_inter_nranks": 1,
    "is_fl_ps_mode": False,
    "is_with_coordinator": False,
    "lamb": False,
    "lamb_configs": {},
    "lars": False,
    "lars_configs": {},
    "localsgd": False,
    "localsgd_configs": {},
    "nccl_comm_num": 1,
    "pipeline": False,
    "pipeline_configs": {},
    "qat": False,
    "qat_configs": {},
    "recompute": False,
    "recompute_configs": {},
    "semi_auto": False,
    "sharding": False,
    "sharding_configs": {},
    "sparse_table_configs": {},
    "split_data": True,
    "sync_nccl_allreduce": True,
    "tensor_parallel": False,
    "tensor_parallel_configs": {},
    "trainer_desc_configs": {},
    "use_hierarchical_allreduce": False,
    "without_graph_optimization": True,
}

# What to use instead of an unsupported field, or of its `_configs`.
INSTEAD = {
    "a_sync": "there is no parameter-server mode",
    "amp": "use torch.autocast and torch.amp.GradScaler",
    "build_strategy": "pass it to ParallelExecutor",
    "execution_strategy": "pass it to ParallelExecutor",
    "lamb": "use an optimizer that implements it",
    "lars": "use an optimizer that implements it",
    "pipeline": "use torch.distributed.pipelining",
    "recompute": "use torch.utils.checkpoint",
    "sharding": "use torch's FSDP",
    "tensor_parallel": "use torch.distributed.tensor.parallel",
}
