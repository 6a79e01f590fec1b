"""Phases of a worker between two instructions, for hooks and faults. Imports no torch."""

from __future__ import annotations

from typing import Literal

Phase = Literal["reduced", "commit", "step", "gather", "stepped", "evaluation", "undo", "acknowledge", "form", "copy"]
"""Phases between instructions.

In an iteration: reduced (gradient sums are complete, before the report), commit (after the report), step (before the
step), gather (before gathering stepped parameters, which other hosts may already do), stepped (after the step),
evaluation (in the middle of the evaluation), undo (before a step is undone). At the begin of a generation: before
acknowledge, form (its groups) and copy (a state to or from another worker).
"""
