"""Gradients travel in fewer bits."""
