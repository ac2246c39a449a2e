"""Checkpoints: `checkpoint` saves and loads, `folder` keeps the files; the other two collect what a file holds."""

from dpfuse.checkpoint.save_load import Checkpoint, load_checkpoint, save_checkpoint

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]
