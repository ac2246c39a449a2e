"""What a training computes, written down as hashes: one line per optimizer step and rank, and how two runs compare.

Read in this order: `sketch` (what is noted beside hashes), `finite` (what is NaN), `phases` (where the time goes),
`program_hooks` and `tracer` (when), `trace_file` (what a line looks like), `attachment` (the variable DPFUSE_TRACE),
then `comparison` and `distance`. Nothing here runs in a process where the variable is not set.
"""
