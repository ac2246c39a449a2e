"""Heartbeats beside the process group, and who is blamed when a rank falls silent. See docs/diagnosis.md."""
