"""Heartbeats beside the process group: they name the rank that ends, falls silent, or leaves its group.

Read in this order: `start` (gives a group its heartbeat), `heartbeat` (the thread of every rank), `server` (rank 0,
which judges), `client` (the other ranks), `diagnosis` (how rank 0 judges, and the texts), `consequences` (what follows
in this process). `requests` has what other threads ask of the heartbeat's thread. `own_status` finds out what this rank
does, and `thread_state` inspects the thread that trains. Messages travel through `endpoint` and `connection`.
`late_ranks` finds the ranks that are late in each step, `phase_lines` at which lines they are, and `delivery_rates` how
fast connections deliver. `process_exit` announces the end of this process. The board between the two threads is in
`dpfuse.comm.waiting`.
"""
