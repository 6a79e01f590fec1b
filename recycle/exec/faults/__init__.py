"""Faults on purpose: their kinds, where each strikes, and a punisher that draws them at random."""
