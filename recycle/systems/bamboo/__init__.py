"""Bamboo (Thorpe et al., NSDI 2023): every worker holds a copy of the next one's stage, and can take it over."""
