"""Norms, clipping, loss scales, weights of batches, and numbers that are not finite."""
