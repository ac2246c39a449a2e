"""Are the replicas still equal? Hashes of weights after the optimizer's steps, which the report of backward compares.

`schedule` says what is hashed when, `hashing` hashes. `check` puts a hash into each report and learns where ranks
differ. `examination` then finds which parameters and ranks, and `finding` says it in words.
"""
