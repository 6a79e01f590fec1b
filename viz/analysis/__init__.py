"""The answers behind the pictures, without Dash: why an instruction waits, what memory holds, how two runs differ.

Works on timelines, planned (`simulate`) or executed (`recycle.ir.trace`), by columns. What needs what, what a gap's
cause is and what memory holds are asked of `recycle.ir`; here it is put together and into words.
"""
