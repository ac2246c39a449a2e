"""An optimizer of which each rank keeps one part. The engine knows nothing of it.

Read `part_sum` (how a bucket travels), `gradient` (what `.grad` is then), `delivery` (one bucket's gradients), `norm`,
`shard` (one bucket's parameters and optimizer states), `sharding` (what a wrapped model is told), and `optimizer` (what
a user calls). `owners` assigns whole matrices to ranks by their cost.
"""

from dpfuse.sharded.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
