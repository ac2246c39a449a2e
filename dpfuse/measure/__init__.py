"""What a training measures of itself: the time of steps and of communication, and how much gradients differ.

Read `metrics` first. It takes `metric_times`, `communication_times` and `local_squares`: the square sums of each rank's
own gradients, from which the noise scale comes.
"""
