"""The programs of the faults: each is given a job, and does what its name says."""
