"""Averaging by hand, after any backward, of modules that need not be wrapped.

Read `plan` (which gradients share a buffer), `fused_allreduce` (over the ranks) and `replicas` (over copies in one
process).
"""
