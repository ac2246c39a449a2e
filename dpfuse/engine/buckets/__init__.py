"""The kinds of buckets: the ways in which gradients are packed, travel and are delivered."""
