"""What goes wrong in data-parallel jobs, done on purpose on real processes, with dpfuse and with torch's DDP.

Each fault is a small program that is given a wrapper, so that both run the very same one. `faults` lists them, with
what each does and what dpfuse owes: the right mean all the same, or an error on every rank that names what it must, in
time. A program only tells what it sees; `judge` decides what came of it:

- right: every rank ended well, and after every backward each gradient was the true mean;
- named error, error: every rank raised before an optimizer could step on wrong gradients;
- silent corruption: a backward returned, and its gradients were not the mean;
- hang: somebody had to be killed, or only the time-out of the process group ended it;
- orphans: ranks outlived their launcher;
- lost: no checkpoint was left that could be loaded;
- crash: a rank was ended by a signal that nobody planted.

`python -m tests.faults` plays them all, prints the table and keeps it as a record in `bench/results/`;
`python -m tests.faults --docs` writes a summary of the newest record into `docs/wrong/diagnosis.md#reliability`.
"""
