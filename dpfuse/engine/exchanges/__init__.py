"""How a packed communication buffer becomes the sum over all ranks.

Read `all_reduce` first, then `ordered` (sums in the order of the ranks, also of eight-bit blocks), `in_place` (large
gradients where they lie, by hand) and `sparse` (rows of embeddings). `hooked` lets a user's communication hook do it:
`comm_hook` calls it, with a `comm_bucket`.
"""
