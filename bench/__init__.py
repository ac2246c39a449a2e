"""Benchmarks of dpfuse beside named peers, on pytest-benchmark; `python -m bench` runs all and writes one record."""
