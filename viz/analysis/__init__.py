"""Analyses behind the pictures, without Dash: causes of waits, memory over time, differences between runs.

They combine and word what `recycle.ir` finds in planned (`simulate`) or executed (`recycle.ir.trace`) timelines.
"""
