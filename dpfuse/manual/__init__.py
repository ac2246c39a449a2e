"""Averaging by hand, after any backward, of modules that need not be wrapped.

Read `gradient_spec` (which gradients can be averaged), `plan` (which of them share a buffer), `fused_allreduce` (over
the ranks) and `replicas` (over copies in one process).
"""
