"""Weights of ranks that drift apart are named, and right programs are not."""
