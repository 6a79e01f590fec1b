"""Sharded checkpoints: their files, who writes which, when, and how a run goes on from one."""
