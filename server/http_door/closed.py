"""Refuses paths of Triton's HTTP endpoint that this server does not serve, with the reason and a remedy (docs/security.md)."""

from __future__ import annotations

from aiohttp import web

from .errors import HttpError
from .fields import shortened

ADMINISTRATION = "is closed: it would let clients change the server; use the flags of kvseek serve and restart it"
CLOSED = {
    "/v2/repository": ADMINISTRATION,
    "/v2/systemsharedmemory": "is closed: it would give clients this machine's memory; send tensors in requests",
    "/v2/cudasharedmemory": "is closed: it would give clients the GPU's memory; send tensors in requests",
    "/v2/trace": ADMINISTRATION,
    "/v2/logging": ADMINISTRATION,
}
OPEN = "/v2/health, /v2/models/MODEL, /v2/models/MODEL/generate and generate_stream"


def routes() -> list[web.RouteDef]:
    """Make the routes for every path that no other route has taken; they must be added last."""
    model = "/v2/models/{model}"
    found = []
    for start in (model, f"{model}/versions/{{version}}"):
        found.append(web.post(f"{start}/infer", infer))
        found.append(web.route("*", f"{start}/trace/setting", closed))
    return [*found, web.route("*", "/{path:.*}", closed)]


async def infer(_: web.Request) -> web.Response:
    """Refuse `infer`, which Triton's HTTP endpoint cannot do either, because the models are decoupled."""
    raise HttpError(
        400, "infer: the models send many responses; use generate or generate_stream, or gRPC ModelStreamInfer"
    )


async def closed(request: web.Request) -> web.Response:
    """Refuse a path with 403 if it is closed on purpose, with 404 if it does not exist."""
    path = request.path
    if path.endswith(("/generate", "/generate_stream")):  # other routes take POST, so this is another method
        raise web.HTTPMethodNotAllowed(request.method, ["POST"])
    if path.endswith("/trace/setting"):
        raise HttpError(403, f"{shortened(path)} {ADMINISTRATION}")
    for prefix, reason in CLOSED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            raise HttpError(403, f"{prefix} {reason}")
    raise HttpError(404, f"{shortened(path)} is not found; there are {OPEN}")
