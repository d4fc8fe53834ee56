"""What Triton's HTTP endpoint has and this server has not: each path says why, and what to use instead (docs/security.md)."""

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
    """Catches every path that no other route has taken: to be added last."""
    model = "/v2/models/{model}"
    found = []
    for start in (model, f"{model}/versions/{{version}}"):
        found.append(web.post(f"{start}/infer", infer))
        found.append(web.route("*", f"{start}/trace/setting", closed))
    return [*found, web.route("*", "/{path:.*}", closed)]


async def infer(_: web.Request) -> web.Response:
    """Triton's HTTP endpoint cannot do this either: the models are decoupled."""
    raise HttpError(
        400, "infer: the models send many responses; use generate or generate_stream, or gRPC ModelStreamInfer"
    )


async def closed(request: web.Request) -> web.Response:
    """403 for what is closed on purpose, 404 for what does not exist."""
    path = request.path
    if path.endswith(("/generate", "/generate_stream")):  # nothing but POST arrives here
        raise web.HTTPMethodNotAllowed(request.method, ["POST"])
    if path.endswith("/trace/setting"):
        raise HttpError(403, f"{shortened(path)} {ADMINISTRATION}")
    for prefix, reason in CLOSED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            raise HttpError(403, f"{prefix} {reason}")
    raise HttpError(404, f"{shortened(path)} is not found; there are {OPEN}")
