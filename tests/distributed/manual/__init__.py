"""Gradients are averaged by hand."""
