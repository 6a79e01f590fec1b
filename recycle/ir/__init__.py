"""The schedule: its instructions, what they depend on, how it is lowered, checked, timed and stored.

Importing the package registers the kinds of instructions that have a module of their own.
"""

from recycle.ir import redundant_forward as redundant_forward
from recycle.ir import replay as replay
