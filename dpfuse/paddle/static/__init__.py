"""`paddle.static`: programs, executors, scopes."""
