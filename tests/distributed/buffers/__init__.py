"""The buffers of a wrapped module are those of rank 0."""
