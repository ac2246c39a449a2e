"""Training programs made at random, whose gradients are averaged by hand beside."""
