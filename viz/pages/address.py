"""Controls whose value stands in the page's address, so that a link opens what was looked at (see `address.js`)."""

from __future__ import annotations

from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State


def keep_in_address(app: Dash, identifier: str, *tabs: State) -> None:
    """Restore the control's `value` from the address under its own identifier, and write it there when it changes.

    Args:
        tabs: the tabs whose values it may have, an address that says another is passed over. All numbers if left out.
    """
    in_browser: Any = app.clientside_callback
    in_browser(
        ClientsideFunction("recycle", "keepInAddress"),
        Output(identifier, "value", allow_duplicate=True),
        Input(identifier, "value"),
        *tabs,
        prevent_initial_call="initial_duplicate",
    )
