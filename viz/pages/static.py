"""Dash components as HTML that needs no server; the first figure brings plotly.js along."""

from __future__ import annotations

from html import escape
from itertools import count
from typing import Any

_ATTRIBUTES = {"className": "class", "colSpan": "colspan", "n_clicks": "", "children": ""}
"""Properties whose HTML attribute has another name; "" for those that are none."""


def static_html(content: Any) -> str:
    """The HTML of text, components of `dash.html`, figures (`dcc.Graph`), and lists of these.

    Raises:
        TypeError: a component that has no meaning without a server.
    """
    return _html(content, count(1))


def _html(content: Any, figures: count[int]) -> str:
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        return "".join(_html(part, figures) for part in content)
    if not hasattr(content, "to_plotly_json"):
        return escape(str(content))
    component = content.to_plotly_json()
    kind, properties = component["type"], component["props"]
    if kind == "Graph":
        return _figure(properties, next(figures))
    if component["namespace"] != "dash_html_components":
        raise TypeError(f"{kind} needs a server")
    tag = kind.lower()
    attributes = "".join(_attribute(name, value) for name, value in properties.items() if value is not None)
    return f"<{tag}{attributes}>{_html(properties.get('children'), figures)}</{tag}>"


def _attribute(name: str, value: Any) -> str:
    attribute = _ATTRIBUTES.get(name, name)
    if not attribute:
        return ""
    if name == "style":
        value = ";".join(f"{key}:{setting}" for key, setting in value.items())
    return f' {attribute}="{escape(str(value))}"'


def _figure(properties: Any, number: int) -> str:
    from plotly.io import to_html

    text = to_html(
        properties["figure"],
        full_html=False,
        include_plotlyjs=number == 1,
        include_mathjax=False,
        config=properties["config"],
        div_id=f"figure-{number}",
    )
    return f'<div class="{properties.get("className", "")}">{text}</div>'
