"""Fault injection: kinds of faults, their points, and random faults. Begin with kinds.py."""
