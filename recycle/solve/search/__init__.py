"""Searches for orders of short periods, and the kernels that they spend their time in."""
