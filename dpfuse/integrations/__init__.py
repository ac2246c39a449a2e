"""Integrations with other libraries. `import dpfuse` imports none of them, and each needs its library.

`lightning` registers a strategy for the package `lightning`, and `pytorch_lightning` registers the same strategy for
the packages `pytorch_lightning` and `lightning_fabric`. Both take their methods from `wrapping`, `counted_loader` and
`stopping`, which import neither.
"""
