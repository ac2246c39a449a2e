"""The engine: averages the gradients of some parameters while backward runs. It imports kernels, `comm` and errors.

Read `plan` (sizes in, buckets out), `autograd` (ready hooks, the end of a backward), `reducer` with `ready` (when a
bucket is sent), `bucket` with `protocols`, `comm_buffer`, `delivery`, `feeds` and `exchanges` (what it is made of).
`assembly` makes the buckets, `bucket_set` holds those in use, and `sync` wires everything. `events` has what is told of
a training. `report` is what the ranks tell each other, `report_layout` and `report_format` where that lies, and
`unused` what follows for parameters without a gradient. Other rooms use `tensor_hash`, `sample` and `random_states`,
too.
"""
