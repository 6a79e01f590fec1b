"""Profiles for the planner: measured times, bytes and links of a job's stages, and comparison with executed runs."""
