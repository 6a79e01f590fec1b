"""Searches for orders with short periods, and their compiled kernels. Begin with `local_search`."""
