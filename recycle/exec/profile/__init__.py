"""Measure what the planner reads: times, bytes and links of a job's real stages; compare what was executed."""
