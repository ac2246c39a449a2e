"""Is the training loop right? Findings that no comparison of the ranks can give, since all ranks do the same.

Read `facts` (what all rules share), `watched_gradient` (what happened to one gradient since it was zero), then
`loop_check`, which is told of backwards and steps and asks the rules. Each other file is one rule.
"""
