"""What keeps other web pages away from the viewer, which has no password and can plan and read schedules.

A page elsewhere may make its own name lead to 127.0.0.1 (DNS rebinding), post to this server, or put it into a frame.
So only requests that name this machine, or a name that was allowed, are answered; posts have to come from the page
itself; and browsers are told to run and load nothing but what this server sends.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection
from hashlib import sha256
from urllib.parse import urlsplit

from dash import Dash
from dash.exceptions import DependencyException
from flask import Response, request

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

_POLICY = {
    "default-src": "'self'",
    "style-src": "'self' 'unsafe-inline'",  # Plotly and Dash set styles of single elements
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "worker-src": "'self' blob:",
    "object-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}


def protect(app: Dash, allowed: Collection[str] = (), scripts: Collection[str] = ()) -> None:
    """Refuse requests under other names and posts of other pages with 403, scripts that Dash does not have with 404 and
    callbacks that the page does not have with 400; and send browsers what they may load.

    Args:
        allowed: names or addresses beside those of loopback under which the viewer is reached, without a port: a
            tunnel or proxy may have another one.
        scripts: texts of script elements that the page holds beside Dash's.
    """
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    names = LOOPBACK | {name.lower() for name in allowed}

    def refuse() -> Response | None:
        host = _name(f"//{request.host}")
        if host not in names:
            return _refused(f"{host!r} is not a name of this viewer; allow it with: recycle view --allow-host NAME")
        origin = request.headers.get("Origin")
        if request.method != "GET" and origin is not None and urlsplit(origin).netloc.lower() != request.host.lower():
            return _refused(f"requests of {origin!r} are not answered")
        if request.path == "/_dash-update-component" and request.method == "POST":
            asked = request.get_json(silent=True)
            output = asked.get("output") if isinstance(asked, dict) else None
            if not isinstance(output, str) or output not in app.callback_map:
                return _refused("this viewer has no such callback; reload the page", 400)
        return None

    def add_headers(response: Response) -> Response:
        sources = ["'self'", *app.csp_hashes(), *(f"'sha256-{digest}'" for digest in hashes)]
        policy = {**_POLICY, "script-src": " ".join(sources)}
        response.headers["Content-Security-Policy"] = "; ".join(f"{of} {what}" for of, what in policy.items())
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    # Without a handler Flask takes Dash's exception for a bug, and prints a traceback.
    def is_not_there(_: DependencyException) -> Response:
        return _refused("there is no such file", 404)

    app.server.before_request(refuse)
    app.server.register_error_handler(DependencyException, is_not_there)
    app.server.after_request(add_headers)


def _name(address: str) -> str:
    try:
        return (urlsplit(address).hostname or "").lower()
    except ValueError:
        return ""


def _refused(why: str, status: int = 403) -> Response:
    return Response(f"recycle: {why}\n", status, mimetype="text/plain")
