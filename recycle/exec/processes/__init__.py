"""The worker processes of this machine: fork, watch and kill them."""
