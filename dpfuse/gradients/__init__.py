"""What is done to gradients besides averaging them; the engine knows none of it by name.

Read `norm` (norms and clipping), `finite` (NaN and infinite values), `weight` and `kept_mean` (a mean over
samples), `loss_scaling` (GradScaler), `loss_scale_and_weight` (one factor for both) and `error_feedback` (what a narrow
wire rounds away).
"""
