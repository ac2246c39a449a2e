"""Benchmarks of dpfuse and its peers, with pytest-benchmark; `python -m bench` runs all and writes one record.

Each suite is a file `bench_*`. Read `interleave` first (all contenders of a case run in turns), then `step_time` (times
whole steps) and `bench_step`, a suite that uses it. `equality` proves that all contenders compute the same.
`baselines` has the peers, `models` what is trained, `network` a simulated network, `published_plans` the buckets of
other systems. `goals` has the numbers to reach; `record`, `table` and `plot` write and show the results.
"""
