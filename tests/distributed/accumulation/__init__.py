"""Gradients of several backwards are added up in the buckets, and averaged once."""
