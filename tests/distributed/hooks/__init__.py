"""Communication hooks of torch."""
