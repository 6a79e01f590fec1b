"""Processes of this machine and of others: fork them, see them end, kill them."""
