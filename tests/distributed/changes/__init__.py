"""A wrapped module changes, or its buckets do."""
