"""Analyses behind the pictures, without Dash: causes of waits, memory over time, differences between runs.

They take planned (`simulate`) or executed (`recycle.ir.trace`) timelines. `recycle.ir` determines dependencies, causes
of gaps and memory; this package combines and words the results.
"""
