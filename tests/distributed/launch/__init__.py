"""The launcher and `spawn` start, name and end ranks."""
