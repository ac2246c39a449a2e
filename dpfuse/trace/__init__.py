"""What a training computes, written down as hashes: one line per optimizer step and rank, and how two runs compare.

Read in this order: `signed_sum` (what is noted beside hashes), `finite` (what is NaN), `step_phases` (where the time
goes); `program_hooks`, `own_gradients`, `gradients_between_backwards` and `traced_model` (what is noted of one model);
`step_hashes` and `traced_optimizers` (of a step); `tracer` and `wrapper_hook` (when), `json_line` (how it is written),
`process_trace` (the variable DPFUSE_TRACE); then `comparison`. `dpfuse.trace_file` says what a line
looks like. Nothing here runs in a process where the variable is not set.
"""
