"""What goes wrong in data-parallel jobs, done on purpose on real processes, with dpfuse and with torch's DDP.

Each fault is a small program that is given a wrapper, so that both run the very same one. `faults` lists them, with
what each does and what dpfuse owes: the right mean all the same, or an error on every rank that names what it must, in
time. A program only tells what it sees; `judge` decides what came of it:

- right: every rank ended well, and after every backward each gradient was the true mean;
- named error, error: every rank raised before an optimizer could step on wrong gradients;
- named warning: the program ended, and a warning said all that an error must;
- late error: a backward returned wrong gradients, and an error came within ten steps;
- silent corruption: gradients or weights were wrong, and the program ended, or went on for ten steps, without a word;
- hang: somebody had to be killed, or only the time-out of the process group ended it;
- orphans: ranks outlived their launcher;
- lost: no checkpoint was left that could be loaded;
- crash: a rank was ended by a signal that nobody planted.

`python -m tests.faults` plays them all, prints the table and keeps it as a record in `bench/results/`;
`python -m tests.faults --docs` writes the table of the newest record into `docs/wrong/diagnosis.md#reliability`. Both
have their defaults there, with shorter time-outs. torch's wrapper is also played with `find_unused_parameters=True` and
with `static_graph=True`, and the best of its three ends counts.
"""
