"""Stopping together: all ranks learn of the wish of one of them in the same step."""
