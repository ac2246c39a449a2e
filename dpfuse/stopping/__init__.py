"""Stopping together: the wish of one rank reaches all of them in the same step, in the reports that travel anyway.

Read `wish` first: what this process wants, and why ranks stop. `request` asks the ranks of one model, and holds what
all ranks of a group know. `mesh_groups` is what the groups of a mesh tell each other. `handlers` makes the wish where a
signal comes, and `deadline` where the job is about to end. `workers` lets the workers of a loader outlive such a
signal, by `worker_start`, `worker_end` and `fork_server`.
"""
