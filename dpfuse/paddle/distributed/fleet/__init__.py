"""`paddle.distributed.fleet`."""
