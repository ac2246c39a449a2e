"""Doors to other libraries, one file each. None is imported by `import dpfuse`, and each needs its library."""
