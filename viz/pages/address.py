"""Controls whose value stands in the page's address, so that a link opens what was looked at (see `address.js`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dash import Dash, Input, Output


def keep_in_address(app: Dash, identifier: str, allowed: Sequence[str] | None = None) -> None:
    """Restore the control's `value` from the address under its own identifier, and write it there when it changes.

    Args:
        allowed: values that it may have; an address that says another is passed over. All numbers if left out.
    """
    in_browser: Any = app.clientside_callback
    constants = f"{json.dumps(identifier)}, value, {json.dumps(allowed)}"
    in_browser(
        f"function (value) {{ return window.recycle.address({constants}); }}",
        Output(identifier, "value", allow_duplicate=True),
        Input(identifier, "value"),
        prevent_initial_call="initial_duplicate",
    )
