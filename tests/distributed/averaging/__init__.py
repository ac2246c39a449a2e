"""Gradients of a backward are averaged: the right numbers, the right bits, in every kind of model."""
