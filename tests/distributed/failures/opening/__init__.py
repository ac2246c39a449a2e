"""A backward of one rank raises, at any line of ours or of its program: for one failure each rank has one error.

Read `programs.py` (what is trained), `lines.py` and `planter.py` (where it raises), `trial.py` (what a rank runs),
`judge.py` and `oracle.py` (what must hold), and `survey.py` (which failures are tried).
`python -m tests.distributed.failures.opening --help` prints what every rank does.
"""
