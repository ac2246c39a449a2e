"""Deliberate defects of dpfuse, and a program that says which of them the tests find: `python -m tests.mutations`.

Read `mutations` for the list, then `__main__` for the program. `test_mutations` keeps the list true to the code.
"""
