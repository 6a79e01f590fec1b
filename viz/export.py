"""Exports without a server: one self-contained HTML file, an SVG or a PNG.

The HTML refers to no address and includes plotly.js if it has figures. SVG and PNG need neither browser nor plotly.
"""

from __future__ import annotations

import gzip
import json
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path
from string import punctuation
from typing import Any
from urllib.parse import quote

from recycle.errors import RecycleError
from recycle.files import write_whole
from viz.figures.svg import SVG_LIMIT, svg
from viz.lane_cache import LaneCache
from viz.lanes import with_common_span
from viz.sources import Source, SystemComparison
from viz.what_if import WhatIf

SUFFIXES = ".html", ".svg", ".png"


def export(
    path: str | Path,
    sources: Sequence[Source],
    what_if: WhatIf | None = None,
    comparisons: Mapping[str, SystemComparison] | None = None,
) -> None:
    """Write `sources` to `path` in the format of its suffix: `.html`, `.svg` or `.png`.

    Answers that need the server, such as causes of waits, are left out of an HTML page.

    Args:
        what_if, comparisons: plans of a job and comparisons of systems, as in `viz.app.build_app`, for an HTML page.

    Raises:
        RecycleError: another suffix, nothing to draw, too much for an SVG, or the file cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise RecycleError(
            f"{path}: cannot export {path.suffix or 'a name without suffix'}: use one of {', '.join(SUFFIXES)}"
        )
    if suffix == ".html":
        write_whole(path, html(sources, what_if, comparisons))
        return
    if what_if is not None or comparisons:
        raise RecycleError(f"{path}: plans of a job and comparisons can only be exported as .html")
    panels = with_common_span([panel for source in sources for panel in source.panels()])
    if not panels:
        names = ", ".join(source.name for source in sources)
        raise RecycleError(f"{path}: nothing to draw: {names} ran no iteration yet")
    if suffix == ".png":
        from viz.figures.raster import sheet

        write_whole(path, sheet(panels))
        return
    operations = sum(len(panel.table) for panel in panels)
    if operations > SVG_LIMIT:
        raise RecycleError(
            f"{path}: {operations} operations are too many for an SVG (at most {SVG_LIMIT}); export .png or .html"
        )
    write_whole(path, svg(panels))


def html(
    sources: Sequence[Source],
    what_if: WhatIf | None = None,
    comparisons: Mapping[str, SystemComparison] | None = None,
) -> str:
    from viz.pages import open_pages
    from viz.pages.page import Workspace
    from viz.scenario import PageModel

    cache = PageModel(sys.maxsize)
    workspace = Workspace.from_sources(sources, what_if=what_if, comparisons=comparisons or {}, cache=cache)
    content = _html([page.static_content() for page in open_pages(workspace)], count(1), cache)
    names = [*(source.name for source in sources), *(comparisons or {})]
    title = escape(names[0] if len(names) == 1 else "recycle")
    style = "".join(file.read_text(encoding="utf-8") for file in sorted(MODULES.parent.glob("*.css")))
    modules = {file.name: file.read_text(encoding="utf-8") for file in sorted(MODULES.glob("*.js"))}
    imports = import_map({name: f"data:text/javascript,{quote(text, _PLAIN)}" for name, text in modules.items()})
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title} · recycle</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}{_STYLE}</style></head><body>\n'
        f'<header class="top"><span class="mark">recycle</span><h1>{title}</h1></header>\n'
        f'<main>\n{content}\n</main><script>{_SCRIPT}</script><script type="importmap">{imports}</script>'
        '<script type="module">import "viz/main.js";</script></body></html>\n'
    )


def import_map(addresses: Mapping[str, str]) -> str:
    """Return the import map for the viewer's JavaScript modules, which import each other as `viz/NAME`."""
    return json.dumps({"imports": {f"viz/{name}": address for name, address in addresses.items()}})


COMPRESSED = "data:application/gzip;base64"
"""Prefix of an address that contains lanes; `assets/modules/table.js` unpacks them."""
MODULES = Path(str(files("viz"))) / "assets" / "modules"
"""Folder of the viewer's JavaScript."""
_PLAIN = "".join(set(punctuation) - set("%#<")) + " "
"""Characters besides letters and digits that a `data:` address of a module may contain."""
_STYLE = "[data-action=memory], [data-action=held] { display: none; }"
_SCRIPT = "window.dash_clientside = { set_props() {} };\n"
"""Stub for Dash, which an exported page lacks."""


_ATTRIBUTES = {"className": "class", "colSpan": "colspan", "n_clicks": "", "children": ""}
"""Property -> its HTML attribute; "" for properties without one."""


def _html(content: Any, figures: count[int], cache: LaneCache) -> str:
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        return "".join(_html(part, figures, cache) for part in content)
    if not hasattr(content, "to_plotly_json"):
        return escape(str(content))
    component = content.to_plotly_json()
    kind, properties = component["type"], component["props"]
    if kind == "Button":
        return ""
    if kind == "Graph":
        return _figure(properties, next(figures))
    if component["namespace"] != "dash_html_components":
        raise TypeError(f"{kind} needs a server")
    tag = kind.lower()
    attributes = "".join(_attribute(name, value, cache) for name, value in properties.items() if value is not None)
    return f"<{tag}{attributes}>{_html(properties.get('children'), figures, cache)}</{tag}>"


def _attribute(name: str, value: Any, cache: LaneCache) -> str:
    attribute = _ATTRIBUTES.get(name, name)
    if not attribute or value is False:
        return ""
    if name == "style":
        value = ";".join(f"{key}:{setting}" for key, setting in value.items())
    if name == "data-address":
        entry = cache.get(value)
        assert entry is not None  # the cache of an export evicts nothing
        value = f"{COMPRESSED},{b64encode(gzip.compress(entry.content, 6, mtime=0)).decode()}"
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
