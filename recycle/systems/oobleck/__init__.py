"""Oobleck (Jang et al., SOSP 2023): pipelines of different depths, from templates that are made once."""

from __future__ import annotations

from recycle.systems.oobleck.oobleck import Oobleck, OobleckRunning

__all__ = ["Oobleck", "OobleckRunning"]
