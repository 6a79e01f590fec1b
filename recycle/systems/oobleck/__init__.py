"""Oobleck (Jang et al., SOSP 2023): pipelines of different depths from precomputed templates."""
