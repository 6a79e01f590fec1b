"""Bamboo (Thorpe et al., NSDI 2023): every worker holds a copy of the next one's stage, and can take it over."""

from __future__ import annotations

from recycle.systems.bamboo.bamboo import Bamboo, BambooRunning

__all__ = ["Bamboo", "BambooRunning"]
