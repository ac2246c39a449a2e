"""A package that is started as `python -m contrast`."""
