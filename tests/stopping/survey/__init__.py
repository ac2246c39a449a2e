"""Sixty trainings that get a signal at some moment: do all ranks stop in one step, and does the rest go on rightly?

`trials` has the list, and what each is like. `program` trains, `notes` and `moments` are what the programs of all kinds
share: what a rank writes down, and when a signal comes. `judge` runs one trial and says what is wrong with it.
`python -m tests.stopping.survey FILE` runs all of them and writes a record.
"""
