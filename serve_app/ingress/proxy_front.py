"""Middlewares and HTTP protocol inside Ray's HTTP proxy, before Serve reads a request.

Serve reads headers as UTF-8 and answers others with 500, acts on headers of its own, and its server
waits without a limit for the rest of a request. It never answers some requests for a WebSocket, and
loses the body of a request that offers HTTP/2, as Java's client does. Serve calls
`proxy_middlewares` where `cluster.ray_compat.PROXY_CALLBACK` names it; then it imports the protocol
class from uvicorn.
"""

import uvicorn.protocols.http.auto
from starlette.middleware import Middleware

from serve_app.ingress.bounded_connection import BoundedConnection
from serve_app.openai.middleware.head_gate import HeadGate


def proxy_middlewares() -> list[Middleware]:
    uvicorn.protocols.http.auto.AutoHTTPProtocol = BoundedConnection
    return [Middleware(HeadGate)]
