"""An optimizer of which each rank keeps one part. The engine knows nothing of it.

Read `division` (which part of a bucket is whose), `part_sum` (how a bucket travels), `gradient` (what `.grad` is then),
`delivery` (one bucket's gradients), `flat_params` and `groups` (parameters, and what updates them), `owners`,
`elementwise_shard`, `whole_shard`, `shards` (one region's states; all of them), `sharding` (what a wrapped model is
told), and `optimizer` (what a user calls).
"""

from dpfuse.sharded.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
