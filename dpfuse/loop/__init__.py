"""Is the training loop right? What is written down of it, and the rules that look at that.

Read `record` (what is known of one model), `journal` (who writes it), `watched_gradient` (what happened to one gradient
since it was zero), then `loop_check`, which asks the rules. Each other file is one rule.
"""
