"""The page at the OpenAI port on which people ask about a document and see what each step read of it (docs/openai.md).

Its files, in the folder `ui/`, are as good as public: they have no data, and the page asks the port's own endpoints.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

FOLDER = Path(__file__).parent / "ui"
PATHS = {
    "/": ("index.html", "text/html"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/page.css": ("page.css", "text/css"),
}
HEADERS = {
    # Of other servers the page reads what the user names as the other server, and nothing else.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self' "
    "http: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[BaseRoute]:
    """Make the routes of the page's files."""
    return [_route(path, (FOLDER / name).read_bytes(), kind) for path, (name, kind) in PATHS.items()]


def _route(path: str, data: bytes, kind: str) -> Route:
    async def answer(_: Request) -> Response:
        return Response(data, media_type=kind, headers=HEADERS)

    return Route(path, answer)
