"""What dpfuse promises, and the faults and tests that prove it; `docs/wrong/diagnosis.md` has the promises in short."""

from __future__ import annotations

__all__ = ["PROMISES"]

# A promise -> faults of `faults` and `jobs` by name, and tests.
PROMISES: dict[str, tuple[str, ...]] = {
    # Ranks agree.
    "Models and options are compared when they are wrapped: names, shapes, strides, dtypes, tied "
    "parameters, buffers, options, version. All ranks raise the same error, with the first difference.": (
        "model_shape",
        "model_count",
        "model_order",
        "model_dtype",
        "bucket_size",
        "tests/distributed/model/test_construction.py"
        "::test_models_that_differ_are_the_same_error_everywhere_naming_the_first_difference",
    ),
    "If one rank cannot wrap its module, all ranks raise.": (
        "meta",
        "tests/distributed/failures/test_bad_input.py"
        "::test_what_one_rank_cannot_wrap_is_an_error_on_the_other_that_names_the_rank_and_the_reason",
    ),
    "All ranks begin with rank 0's parameters and buffers.": (
        "bn_buffers",
        "tests/distributed/model/test_construction.py::test_rank_0_hands_out_every_parameter_and_buffer_bit_by_bit",
    ),
    "Buckets depend only on what was compared, never on time: they are sent in plan order, in whichever "
    "order they become ready.": (
        "tests/distributed/changes/test_rebuild.py::test_buckets_are_sent_in_plan_order_whatever_becomes_ready_first",
        "tests/distributed/changes/test_rebuild.py::test_all_ranks_rebuild_in_the_order_of_rank_0_and_still_agree",
    ),
    "A forward under `torch.no_grad()` communicates nothing, so one rank may evaluate alone.": ("eval_one_rank",),
    "Nothing that a peer sends is executed.": (
        "tests/distributed/launch/test_security.py::test_a_pickle_from_a_peer_is_text",
    ),
    # Ranks do the same.
    "If ranks ran different numbers of backwards or forwards since the last mean, all of them raise in "
    "that backward: `no_sync()` on one rank, a batch left out after its forward. This needs "
    "no additional collective. With weights windows may differ in length, and ranks only report a "
    "backward that an exception ended.": (
        "no_sync_one_rank",
        "skipped_micro_batch",
        "skipped_backward",
        "tests/distributed/failures/test_different_counts.py::test_every_rank_raises",
        "tests/distributed/costs/test_step_costs.py::test_a_step_sends_each_bucket_once_and_nothing_else",
    ),
    "If ranks run the backwards of two wrapped models in different orders, all of them raise.": (
        "wrappers_swapped",
        "tests/distributed/failures/test_different_counts.py"
        "::test_the_backwards_of_two_equal_models_in_another_order_are_noticed",
    ),
    "If several wrapped models share a backward, their buckets leave in the same order on every rank, "
    "also where ranks use different parameters. Should the order differ all the same, all ranks raise in "
    "that backward.": (
        "tests/distributed/averaging/test_several_models.py"
        "::test_two_models_of_which_ranks_use_other_parameters_get_the_gradients_of_torch",
        "tests/distributed/averaging/test_several_models.py"
        "::test_another_order_of_buckets_is_a_named_error_of_every_rank_and_model",
    ),
    "If some ranks do not use a parameter, it gets the mean with zeros from them. If no rank uses it, it "
    "stays without gradient. No flag is needed.": (
        "unused_one_rank",
        "unused_everywhere",
        "unused_now_and_then",
        "tests/distributed/averaging/test_unused.py::test_a_rank_that_uses_no_parameter_takes_part",
    ),
    "If an exception ends a backward on one rank, each rank raises once. After the gradients are set to zero, "
    "the next step is correct.": (
        "exception_mid_backward_caught",
        "tests/distributed/failures/test_interruptions.py"
        "::test_an_exception_on_one_rank_is_one_error_on_each_and_the_next_step_is_right",
    ),
    "What a rank runs in place of a forward that raised is averaged. If it skips that batch, the error at the "
    "end of the data names it, and the forward.": (
        "exception_caught",
        "tests/distributed/failures/test_second_attempts.py::test_what_runs_in_its_place_is_averaged",
    ),
    "Your own collectives between backwards are allowed, in the same order on all ranks.": ("user_collectives",),
    "Collectives inside a backward, such as those of a `SyncBatchNorm`, are allowed. Where ranks use "
    "different parameters, those of your own need `find_unused_parameters=True`.": (
        "tests/distributed/averaging/test_several_models.py"
        "::test_heads_that_each_rank_chooses_above_a_synchronised_batch_norm",
        "tests/distributed/averaging/test_several_models.py::test_collectives_of_the_program_in_the_same_backward",
    ),
    # Ranks that end, or are silent.
    "If a rank ends, all others name it within seconds, with its exception if it had one.": (
        "kill_mid_backward",
        "exception_exit",
        "tests/distributed/failures/test_heartbeat.py::test_a_killed_rank_is_named_at_once",
        "tests/distributed/failures/test_heartbeat.py"
        "::test_a_rank_that_raises_is_named_with_its_exception_on_the_other_face_too",
    ),
    "If a rank is silent, the others report it after ten seconds at most. After `stall_timeout` they "
    "raise, with the position of each rank, and their processes end. If the network is cut, this happens "
    "on both sides.": (
        "freeze_rank",
        "link_down",
        "frames_vanish",
        "tests/distributed/failures/test_heartbeat.py::test_a_frozen_rank_is_reported_and_given_up",
        "tests/distributed/failures/test_heartbeat.py::test_a_link_that_is_cut",
    ),
    "If ranks wait for each other in different places, they raise and name these places.": (
        "uneven_steps",
        "tests/distributed/failures/test_heartbeat.py::test_a_rank_that_stays_in_a_collective_of_its_own_is_a_deadlock",
    ),
    "The others wait for a rank that computes, for any time. Short silences have no effect.": (
        "stall_short",
        "gil_held",
        "blip",
        "tests/distributed/failures/test_heartbeat.py::test_a_long_evaluation_is_waited_for",
    ),
    # Modules that change.
    "Parameters may be added, replaced, frozen, unfrozen or converted after wrapping, if all ranks do the same.": (
        "param_replaced",
        "param_added",
        "module_converted",
        "frozen_after_wrap",
        "unfrozen_after_wrap",
        "tests/distributed/changes/test_changed_everywhere.py::test_a_change_on_all_ranks_is_followed",
    ),
    "Buffers may differ in shape between ranks, as caches do. A graph that saved a buffer keeps its value "
    "when rank 0's arrive.": (
        "tests/distributed/buffers/test_caches.py::test_caches_that_differ_between_ranks_are_left_to_each_rank",
        "tests/distributed/buffers/test_saved_by_graphs.py"
        "::test_gradients_are_those_of_the_buffers_that_the_forward_saw",
    ),
    "A change of parameters on some ranks only is an error on all.": (
        "param_replaced_one_rank",
        "tests/distributed/changes/test_changed_differently.py"
        "::test_a_change_on_one_rank_is_an_error_on_all_and_goes_once_all_have_it",
    ),
    "A change loses nothing that was accumulated.": (
        "zeroed_to_none",
        "tests/distributed/changes/test_changed_everywhere.py::test_nothing_that_was_accumulated_gets_lost",
    ),
    "`model.module(x)`, two backwards, checkpointed layers, copies, unpickled wrappers: all are averaged.": (
        "inner_module_called",
        "two_backwards",
        "activation_checkpoint",
        "deepcopy_wrapped",
        "pickle_wrapped",
    ),
    "Accumulation gives the mean of the sums, with and without unused parameters.": (
        "accumulation",
        "no_sync_unused",
        "tests/distributed/averaging/test_sync_rules.py::test_rule",
    ),
    # Numbers.
    "On two ranks, all bits equal those of torch's DDP.": (
        "tests/distributed/averaging/test_default_path.py"
        "::test_two_ranks_have_the_bits_of_ddp_whatever_the_model_the_sizes_and_the_accumulation",
    ),
    "On more ranks, they equal those of one all-reduce per bucket of the plan that is shown.": (
        "tests/distributed/averaging/test_default_path.py"
        "::test_gradients_are_those_of_one_all_reduce_per_bucket_of_the_published_layout",
    ),
    "No delay changes a bit.": (
        "tests/distributed/averaging/test_schedules.py::test_no_delay_changes_a_bit_and_buckets_leave_during_backward",
    ),
    "With `deterministic=True` no bit depends on sizes or order of the buckets.": (
        "tests/distributed/averaging/test_deterministic.py"
        "::test_every_gradient_is_the_sum_in_rank_order_whatever_the_buffer_sizes",
    ),
    "16-bit gradients do not overflow in the sum.": ("fp16_large",),
    "On a narrow wire the error of a mean is within the bound of its format, and all ranks hold the same bits.": (
        "tests/distributed/wires/test_wire_reduce.py::test_errors_keep_to_the_theory_and_all_ranks_are_alike",
    ),
    "With `error_feedback=True` what was rounded away arrives later. Nothing is lost, except what a warning names.": (
        "tests/distributed/wires/test_error_feedback.py::test_what_arrives_is_the_true_sum_but_for_what_is_kept",
    ),
    'With `check_finite="raise"` a NaN or an infinity is an error on every rank, in that backward. The '
    "rank that sent it names the parameter and the step, and the others name the rank.": (
        "nan_checked",
        "tests/distributed/norms_and_scaling/test_check_finite.py::test_a_rank_that_sends_nan_is_named_on_every_rank",
    ),
    "Without `check_finite`, a NaN or an infinity travels as under torch's DDP.": ("nan_one_rank",),
    "Weights of ranks that become different are named within 64 steps, with the parameter, on every rank.": (
        "drift_weight",
        "drift_bit",
        "drift_rate",
        "drift_state",
        "tests/weights/test_drifts.py::test_a_drift_is_named",
    ),
    "Parameters with strides, and empty, tied, complex and sparse ones, are averaged correctly. So are "
    "several dtypes.": (
        "strided_grads",
        "zero_size",
        "tied",
        "complex",
        "sparse",
        "several_dtypes",
    ),
    # Buffers and streams.
    "After a synchronised backward the module's buffers are rank 0's on every rank, also if it was interrupted.": (
        "tests/distributed/buffers/test_after_backward.py"
        "::test_buffers_are_those_of_rank_0_after_each_synchronised_backward",
        "tests/distributed/buffers/test_after_backward.py::test_an_interrupted_backward_sends_them_too",
    ),
    "A bucket keeps one communication buffer for its whole life. Its states follow each other, and every "
    "other move is an error.": (
        "tests/unit/test_bucket_states.py::test_every_illegal_move_of_every_bucket_is_an_error",
    ),
    "No memory is overwritten that backward still reads.": (
        "tests/distributed/averaging/test_in_place_safety.py"
        "::test_a_gradient_that_backward_still_reads_is_not_overwritten",
    ),
    "A list of addresses that does not fit the plan is named before a kernel runs.": (
        "tests/kernels/test_entries.py::test_each_corruption_of_each_entry_is_named",
    ),
    "A list of addresses is not overwritten before the kernel has read it.": (
        "tests/kernels/test_address_ring.py::test_every_kernel_reads_its_own_list_however_late_the_streams_run",
        "tests/gpu/test_kernels_gpu.py::test_fifty_changing_lists_behind_a_busy_stream",
    ),
    "Offsets are of 64 bits.": (
        "tests/kernels/test_far_ends.py::test_the_last_programs_of_a_layout_beyond_31_bits",
        "tests/gpu/test_kernels_gpu.py::test_the_last_element_beyond_31_bits_is_right",
    ),
    "Every bucket is packed after all streams that wrote into it.": (
        "tests/unit/test_streams.py::test_every_bucket_is_packed_behind_all_streams_that_wrote_into_it",
    ),
    "In any order of the streams, the bits are those of a run in which each stream waits for the others.": (
        "tests/gpu/test_streams_gpu.py::test_random_schedules_are_bitwise_right_and_buckets_travel_meanwhile",
    ),
    "Averaging overlaps with backward nevertheless.": (
        "tests/distributed/changes/test_rebuild.py::test_buckets_are_sent_while_backward_still_runs",
    ),
    # The launcher.
    "No rank outlives its launcher, however the launcher ends (Linux).": (
        "launcher_sigterm",
        "launcher_sigint",
        "launcher_sighup",
        "launcher_sigkill",
        "tests/distributed/launch/test_launch.py::test_no_rank_outlives_the_launcher",
    ),
    "Ranks that do not end on request are killed, with the processes that they have started.": (
        "sigterm_ignored",
        "tests/distributed/launch/test_forced_end.py::test_the_launcher_is_asked_to_end_and_its_ranks_will_not",
    ),
    "The rank that failed first is named, and gives its exit code.": (
        "rank_raises",
        "rank_raises_peer_sleeps",
        "rank_exits",
        "rank_killed",
        "tests/distributed/launch/test_launch.py::test_a_failing_rank_ends_the_job_is_named_and_gives_its_exit_code",
    ),
    "If a port is taken, the error names it. Without a given port each job takes a free one.": (
        "port_taken",
        "second_job",
        "tests/distributed/launch/test_launch.py::test_a_taken_port_is_named",
    ),
    "Jobs without a fault end with exit code 0, 200 of 200.": (
        "plain",
        "tests/faults/test_plain_jobs.py::test_every_ordinary_job_ends_well",
    ),
    # Stopping.
    "If one rank asks to stop, all of them know after the same backward, however gradients are averaged. "
    "This adds no collective.": (
        "tests/stopping/test_same_backward.py"
        "::test_every_rank_knows_after_the_first_backward_that_begins_behind_the_wish",
        "tests/stopping/test_same_backward.py::test_on_a_gpu_every_rank_knows_one_backward_later",
        "tests/stopping/test_same_backward.py"
        "::test_a_training_in_which_nobody_asks_exchanges_nothing_and_one_that_stops_exchanges_once",
    ),
    "A signal at any moment of a step ends a job in one step, with one whole checkpoint. The rest, also "
    "on another number of ranks, trains each sample once.": (
        "tests/stopping/test_survey.py::test_all_ranks_stop_in_one_step_and_the_rest_goes_on_rightly",
    ),
    "A job whose end is known stops in time without a signal.": (
        "tests/stopping/test_deadline.py::test_all_ranks_stop_in_time_where_one_of_them_knows_the_end",
    ),
    # Checkpoints.
    "A kill at any moment while saving loses nothing.": (
        "checkpoint_kill",
        "tests/distributed/model/test_checkpoint_files.py::test_no_kill_while_saving_loses_a_checkpoint",
        "tests/distributed/model/test_checkpoint_files.py::test_not_one_of_many_kills_loses_a_checkpoint",
    ),
    "A damaged file is noticed, and the one before it is loaded.": (
        "tests/distributed/model/test_checkpoint_files.py::test_every_changed_bit_and_every_cut_is_noticed",
        "tests/distributed/model/test_checkpoint.py::test_a_damaged_file_is_told_of_and_the_one_before_is_loaded",
    ),
    "A resumed training equals one without an interruption, to the bit, with the same options and as many ranks.": (
        "tests/distributed/model/test_checkpoint.py::test_a_resumed_training_equals_an_uninterrupted_one_to_the_bit",
        "tests/distributed/model/test_saved_plan.py::test_three_ranks_go_on_with_the_same_bits",
    ),
    "Under `--max_restarts` it resumes by itself.": (
        "tests/examples/test_resume.py::test_a_crash_changes_nothing_in_the_end",
    ),
    "A training that a signal to one rank stops loses no sample and repeats none, also on another number of ranks.": (
        "tests/examples/test_preempted.py::test_two_signals_lose_no_sample_and_repeat_none",
    ),
    "A file cannot run code.": (
        "tests/distributed/model/test_checkpoint_files.py::test_a_file_that_would_run_code_is_not_loaded",
    ),
}
