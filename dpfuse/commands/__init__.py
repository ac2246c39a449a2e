"""The commands `dpfuse plan`, `dpfuse tune` and `dpfuse bench`; only `__main__.py` and `bench.py` import them.

Read in this order: `command_line` (flags and exit codes), `user_model` (the model that a command is about), `ranks`
(the processes on which it runs), then `plan_command`, `tune_command`, `bench_command`. A benchmark consists of
`contenders` (what is compared), `mean_check` (gradients are right), `sweep` (timing) and `recommendation`.
`report_folder`, `report_file` and `machine` write the report.
"""
