"""How gradients come into the communication buffer of a bucket.

Read `at_once` (all of them when the bucket is sent) first, then `eager` (a large one as soon as it is ready, on a CPU)
and `accumulating` (over the batches of a window, in the buffer itself).
"""
