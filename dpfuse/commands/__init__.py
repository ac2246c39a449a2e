"""The command `dpfuse`, with a file for each of its commands; only `__main__.py` imports them.

Read `command_line` first: flags and exit codes. It calls the files `*_command.py`, and `doctor/`. `user_model` finds
the model that `dpfuse plan` shows. `replacement` acts in the processes of `dpfuse run`, where `startup.py` names it.
`machine` serves reports.
"""
