"""A backward of one rank raises at the n-th line of the library, and its program takes the next batch.

Read `programs.py` (what is trained), `lines.py` (where it raises), `trial.py` (what a rank runs, and what must hold).
`python -m tests.distributed.failures.opening --help` prints what every rank does.
"""
