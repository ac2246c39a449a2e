"""Are the replicas still equal? Hashes of weights after the optimizer's steps, which the report of backward compares.

`states` says what follows what, and `check` does it, with `steps` and `backward_begins` (events), `schedule` (what is
hashed next), `compared_tensors`, `hashing`, `delayed` (what ranks hear), `suspicion` and `false_alarms`. Where ranks
differ, `which_ranks_differ` finds in what, and `known_differences` keeps what is known. `uncompared` stands alone. The
words of what is found are those of DPF-W01 in `dpfuse.rules`.
"""
