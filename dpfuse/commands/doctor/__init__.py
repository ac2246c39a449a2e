"""`dpfuse doctor`: a user's program under torch's DDP and under dpfuse, in turns.

Read in this order: `doctor_command` (what happens when), `report_folder` (where the report goes), `runs` (one run of
the program), `run_request` (what a run is told), `observer`, `call_notes` and `means_by_hand` (what acts inside its
processes), `changed_files`; then what is concluded from runs: `numbers` (are they the same?), `speed` (where the time
goes), `findings` (what is wrong, with `not_finite`, `skipped_steps`, `cut_windows`, `loop_calls`, `hooked_gradients`
and `unstepped`), `too_few_steps`; and `summary`, `page` and `charts`, which show it.
"""
