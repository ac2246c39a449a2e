"""Data parallelism over one dimension of a mesh, tensor parallelism over the other."""
