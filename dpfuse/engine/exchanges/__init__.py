"""How a packed buffer becomes the sum over all ranks.

Read `all_reduce` first, then `ordered` (sums in the order of the ranks, also of eight-bit blocks), `in_place` (large
private gradients where they lie), `sparse` (rows of embeddings) and `hooked` (a user's communication hook, with
`comm_hook` and `comm_bucket`).
"""
