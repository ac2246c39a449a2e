"""The wrapped model: how it is made, copied, saved and measured."""
