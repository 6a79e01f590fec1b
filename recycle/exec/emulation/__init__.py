"""Stages that take the profile's time and bytes without a model: the executor on many processes and no GPU.

May import what `recycle.exec.model` may, and that. Begin reading at stage.py.
"""
