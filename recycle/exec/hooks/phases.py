"""Phases of a worker between two instructions, for hooks and faults. Imports no torch."""

from __future__ import annotations

from typing import Literal

Phase = Literal["reduced", "commit", "step", "gather", "stepped", "evaluation", "undo", "acknowledge", "form", "copy"]
"""Phases between instructions: an iteration's, then those at the beginning of a generation.

reduced: before the report of complete gradient sums; commit: after the report; step: before the step; gather: before
gathering parameters; stepped: after the step; evaluation: in the middle of the evaluation; undo: before a step is
undone. acknowledge, form, copy: before acknowledging, before forming groups, before copying a state.
"""
