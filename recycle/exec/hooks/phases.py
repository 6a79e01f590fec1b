"""Where a worker is between two instructions, as hooks and faults name it. Imports no torch."""

from __future__ import annotations

from typing import Literal

Phase = Literal["reduced", "commit", "step", "gather", "stepped", "evaluation", "undo", "acknowledge", "form", "copy"]
"""The sums of the worker's gradients are complete, and it is about to report them; it has reported; is about to step;
is about to gather what others have stepped, who may be in that gather already; has stepped; is in the middle of the
evaluation that follows the step; is about to take a step back; and of a generation that begins with the step: is about
to acknowledge it, to form its groups, to copy a state to or from another worker."""
