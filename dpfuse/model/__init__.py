"""The wrapped module: may it be wrapped, is it the same on every rank, and was it changed since?

Read `options` and `check` first, then `agreement` (the ranks start with one model), `signature`, `change` and
`module_follower` (the module was changed), `buffers`, and `state_dict` with `key_reading` and `trial_load`.
`module_sync` brings all of it together with the engine.
"""
