"""Sharded checkpoints: file format, completion and resuming. Begin with checkpoint.py."""
