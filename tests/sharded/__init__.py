"""Tests of the sharded optimizer."""
