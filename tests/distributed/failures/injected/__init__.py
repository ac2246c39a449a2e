"""One rank fails at one point of the library during a backward: harness, and a table of what every rank does then.

Read `cases.py` (what is trained), `faults.py` (where it fails), `trial.py` (what a rank runs), `judge.py` (what must
hold) and `survey.py` (many trials). `python -m tests.distributed.failures.injected --help` prints tables.
"""
