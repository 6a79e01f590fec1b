"""Bamboo (Thorpe et al., NSDI 2023): every worker holds a copy of the next stage and can take over."""
