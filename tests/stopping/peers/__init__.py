"""How others stop all ranks: the same small training in five ways, each with SIGTERM to the launcher or to one rank.

`program` is the training, as one rank of it. `trial` starts a job, sends the signal, and says what came of it. `table`
makes the rows of `docs/train/stop_together.md` from a record. `python -m tests.stopping.peers` plays all, and writes
one; it needs accelerate and Lightning.
"""
