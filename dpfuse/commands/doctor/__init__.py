"""`dpfuse doctor`: a user's program under torch's DDP and under dpfuse, in turns.

Read in this order: `doctor_command` (what happens when), `output_folder` (where the page goes), `runs` (one run of the
program), `run_request` (what a run is told), `observer` (what acts inside its processes, with the parts below),
`changed_files`; then what is concluded from runs: `same_numbers` (are they the same?), `speed` (where the time goes),
`findings` (what is wrong, as `dpfuse.rules` and dpfuse itself say it), `skipped_steps`, `too_few_steps`; and `result`
(all of it), which `summary`, `page` and `charts` show.

The parts of the observer: `wrapper_constructors` (the constructors of wrappers), `messages` (warnings, the log,
exceptions), `read_files` (what is opened), `sampler_passes` (loaders and samplers), `scaler_steps` (scalers),
`call_notes` and `means_by_hand` (calls around the steps), `measurements` (dpfuse's communication and tuner),
`untraced_steps` (steps without a line); `rank_of_process`, `waiting_time` and `process_end` (when a process ends). All
functions of torch and Python that they replace go through `replaced_function`.
"""
