"""What is expected of each of torch's DDP tests, and why. Every one of them is in exactly one of these lists."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOT_COUNTED", "PRIVATE", "PUBLIC", "QUICK", "REFUSED", "Private", "Refused"]


@dataclass(frozen=True)
class Private:
    """A test that looks at private parts of torch's class.

    Args:
        reason: which ones, and what they mean for us.
        passes: whether it passes for us.
    """

    reason: str
    passes: bool = True


@dataclass(frozen=True)
class Refused:
    """A test which asserts that torch's class refuses what ours does.

    Args:
        reason: what it refuses.
        replacement: the test of ours that proves the right mean, as pytest names it.
        fails_with: what the test says of our class.
    """

    reason: str
    replacement: str
    fails_with: str = "not raised"


MEANS = "tests/torch_suite/test_means.py::"
TWO_COPIES = "_mp_param and _fp_param: torch keeps two copies of a parameter, ours casts in the graph and keeps one"
SYNC_BN = "SyncBatchNorm computes on GPUs only"
GPU_NUMBER = "compares the number of a GPU"

# Public behaviour: torch's class passes, ours must pass.
PUBLIC = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_non_default_stream",
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_compile_static_graph",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_zero_output_features",
    "test_grads_same_across_ranks_with_no_sync",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
)

PRIVATE = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": Private(
        "hands `logger`, an object of torch's C++ reducer, to a function of that reducer", passes=False
    ),
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger": Private(
        "tests a function of torch's C++ reducer; the wrapper is only constructed"
    ),
    "test_ddp_broadcast_buffer_via_hook": Private("_register_buffer_comm_hook and _default_broadcast_coalesced"),
    "test_ddp_buffer_hook_allreduce": Private("_register_buffer_comm_hook, before and after the forward"),
    "test_ddp_buffer_hook_allreduce_return_future": Private("_register_buffer_comm_hook, with futures"),
    "test_ddp_build_debug_param_to_name_mapping": Private(
        "_build_params_for_reducer and _build_debug_param_to_name_mapping: the plan knows parameters and names"
    ),
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": Private("the same two methods"),
    "test_ddp_comm_hook_logging": Private("_get_ddp_logging_data: the name of the hook is a fact"),
    "test_ddp_logging_data_cpu": Private(
        "_get_ddp_logging_data: times of sampled iterations, which cost every step; dpfuse.time_communication "
        "measures when it is asked to",
        passes=False,
    ),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": Private(TWO_COPIES, passes=False),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": Private(TWO_COPIES, passes=False),
    "test_ddp_native_mixed_precision_ignored_params": Private(TWO_COPIES, passes=False),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": Private(TWO_COPIES, passes=False),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": Private(TWO_COPIES, passes=False),
    "test_ddp_profiling_autograd_profiler": Private(
        "counts torch's all-reduces in a profile, and looks for its walk over the graph: our first step has one "
        "exchange more, and no step walks",
        passes=False,
    ),
    "test_ddp_profiling_torch_profiler": Private("the same, with the newer profiler", passes=False),
    "test_ddp_python_error_logged": Private("_get_ddp_logging_data: the text of the last error"),
    "test_ddp_remove_autograd_hooks": Private("_remove_autograd_hooks: hooks have handles"),
    "test_ddp_sink_noclone": Private("_set_ddp_sink_clone: nothing is cloned in the first place"),
    "test_ddp_uneven_input_join_disable": Private("_join_config, of torch's Joinable"),
    "test_ddp_uneven_inputs": Private("_authoritative_rank and _get_ddp_logging_data, after each of 90 join()s"),
    "test_detect_ddp_is_actually_static": Private(
        "reducer._ddp_graph_static(), torch's licence to stop its walks; nothing of ours depends on it, so it is True",
        passes=False,
    ),
    "test_different_graph_across_ranks": Private(
        "_get_ddp_logging_data: torch rebuilds no buckets with find_unused_parameters=True; ours are rebuilt always",
        passes=False,
    ),
    "test_get_data_parallel_params": Private("_get_data_parallel_params: a filter by name"),
    "test_skip_all_reduce_unused_parameters": Private(
        "_get_ddp_logging_data: counts the buckets that are sent; all of ours are, or ranks could not differ in what "
        "they use",
        passes=False,
    ),
    "test_verify_model_across_rank_with_logger": Private(
        "tests a function of torch's C++ reducer with `logger`; any exception satisfies it, so also that there is none"
    ),
    "test_verify_model_across_rank_without_logger": Private(
        "tests a function of torch's C++ reducer; the wrapper is only constructed"
    ),
}

REFUSED = {
    "test_ddp_control_flow_different_across_ranks": Refused(
        "parameters that one rank alone leaves unused, without the flag",
        MEANS + "test_layers_that_one_rank_leaves_unused_get_the_mean",
        fails_with="_get_local_used_map",  # which it asks for first; a reducer that walks no graph has none
    ),
    "test_ddp_control_flow_same_across_ranks": Refused(
        "parameters that all ranks leave unused in some steps, without the flag",
        MEANS + "test_layers_that_all_ranks_leave_unused_in_some_steps_get_the_mean",
        fails_with="_get_local_used_map",  # which it asks for first; a reducer that walks no graph has none
    ),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": Refused(
        "nested modules left unused, without the flag, beside ignored parameters",
        MEANS + "test_unused_nested_modules_beside_ignored_parameters_keep_no_gradient",
    ),
    "test_ddp_multiple_nested_unused_params_error": Refused(
        "nested modules left unused, without the flag",
        MEANS + "test_unused_nested_modules_keep_no_gradient",
    ),
    "test_ddp_unused_params_rebuild_buckets_exception": Refused(
        "a parameter that is never used, when buckets are to be rebuilt",
        MEANS + "test_a_layer_that_is_never_used_does_not_end_training",
    ),
    "test_invalid_static_graph": Refused(
        "a graph that changes although static_graph=True",
        MEANS + "test_a_graph_may_change_although_it_was_declared_static",
    ),
    "test_static_graph_api_cpu": Refused(
        "_set_static_graph() after the first step",
        MEANS + "test_static_graph_may_be_declared_after_the_first_step",
    ),
}

# Torch's own class does not pass on the CPU.
NOT_COUNTED = {
    "test_DistributedDataParallel": "torch skips it on Linux: with _set_static_graph(), its class no longer averages "
    "once it was saved and loaded between two steps",
    "test_DistributedDataParallel_SyncBatchNorm": SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_half": SYNC_BN,
    "test_ddp_device": GPU_NUMBER,
    "test_ddp_has_finalized": "torch skips it as failing; it waits for NCCL to end a process",
    "test_ddp_hook_pickling_powerSGD": "torch skips it as flaky; it loads a hook's state with weights_only, in vain",
    "test_ddp_inference": SYNC_BN,
    "test_ddp_logging_data_gpu": GPU_NUMBER,
    "test_ddp_profiling_execution_trace": "reads NCCL's metadata",
    "test_ddp_sync_bn_training_vs_eval": SYNC_BN,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": SYNC_BN,
    "test_sync_bn_logged": SYNC_BN,
}

# Without the marker `slow`, one each: the constructor, accumulation, hooks, join, buffers, unused parameters, a
# refusal, static graphs.
QUICK = frozenset(
    {
        "test_DistributedDataParallel_requires_grad",
        "test_accumulate_gradients_no_sync",
        "test_ddp_comm_hook_logging",
        "test_ddp_grad_div_uneven_inputs",
        "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
        "test_ddp_shared_grad_acc_unused_params",
        "test_ddp_unused_params_rebuild_buckets_exception",
        "test_static_graph_multi_forward",
    }
)
