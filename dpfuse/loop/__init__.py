"""Is the training loop right? What is written down of it, and what the rules of `dpfuse.rules` are asked about.

Read `training_record` (what is known of one model), `journal` (what writes it, and sees whether a rule has something to
look at), `watched_gradient` (what happened to one gradient since it was zero), then `loop_check`, which has the rules
asked. Each other file collects what one rule looks at.
"""
