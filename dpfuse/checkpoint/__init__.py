"""Checkpoints: save a training between two steps, and resume it.

Read in this order: `save_load` (the two public functions, and what the ranks exchange), `folder` (files that are
written whole or not at all, and checked before use), `training_state` (which objects have state, and whether a saved
state fits).
"""

from dpfuse.checkpoint.save_load import Checkpoint, load_checkpoint, save_checkpoint

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]
