"""The router as an ASGI app. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from rorqual.server import errors
from rorqual.server.errors import APIError
from rorqual.server.gateway import Gateway
from rorqual.server.health import Status, Version
from rorqual.server.metrics import CONTENT_TYPE
from rorqual.server.router.health import HealthChecks
from rorqual.server.router.metrics import RouterMetrics
from rorqual.server.router.policy import Balancer, Replica
from rorqual.server.router.proxy import Proxy
from rorqual.server.router.settings import RoutingSettings
from rorqual.server.settings import ListenerSettings


class RouterState:
    """The router's state; see `Drainable`."""

    def __init__(self, replicas: Sequence[Replica], settings: RoutingSettings) -> None:
        self.draining = False
        self.num_http_requests = 0
        self.balancer = Balancer(replicas, settings)
        self.checks = HealthChecks(self.balancer, settings)
        self.proxy = Proxy(self.balancer, self.checks, settings)

    def abort_all(self) -> None:
        """End all requests; their clients are told."""
        self.proxy.abort_all()

    def check(self) -> None:
        """Raises APIError (503) if no replica takes requests."""
        replicas = self.balancer.replicas
        if not any(replica.is_healthy for replica in replicas):
            said = "; ".join(f"{replica.url}: {replica.failure}" for replica in replicas)
            raise APIError(503, f"no replica takes requests ({said})", code="no_replica")


def create_router(
    replicas: Sequence[Replica],
    settings: RoutingSettings,
    listener: ListenerSettings,
    *,
    publish_replicas: bool = False,
) -> FastAPI:
    """The app in front of these replicas.

    Args:
        replicas: all there are.
        settings: how they share requests.
        listener: of the address that the app is served on.
        publish_replicas: whether /metrics has those of the replicas too, which nobody else can read.
    """
    state = RouterState(replicas, settings)
    metrics = RouterMetrics(state.balancer, state.proxy, with_replicas=publish_replicas)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await state.checks.start()
        yield
        await state.checks.stop()
        for replica in replicas:
            replica.client.close()

    app = FastAPI(title="Rorqual router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.serving = state
    errors.install(app)

    @app.get("/health")
    async def health() -> Status:
        """200 while any replica takes requests."""
        state.check()
        return Status()

    @app.get("/ready")
    async def ready() -> Status:
        """The same, unless the router is about to end."""
        if state.draining:
            raise APIError(503, "the router is about to end", code="draining")
        state.check()
        return Status()

    @app.get("/version")
    async def version() -> Version:
        """The router's version."""
        return Version(version=metadata.version("rorqual"))

    @app.get("/load")
    async def load() -> dict[str, Any]:
        """How busy the replicas are."""
        shown = [
            {"url": r.url, "healthy": r.is_healthy, "failure": r.failure, "running": r.num_running, "load": r.load}
            for r in replicas
        ]
        return {"server_load": sum(r.load for r in replicas), "draining": state.draining, "replicas": shown}

    @app.get("/metrics")
    async def published() -> Response:
        """For Prometheus."""
        return Response(await metrics.text(), headers={"content-type": CONTENT_TYPE})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Have all replicas forget their prefixes."""
        answer = await state.proxy.everywhere(request.scope, request.receive)
        if answer.status_code == 200:
            for replica in replicas:
                replica.prefixes.clear()
        return answer

    app.router.redirect_slashes = False
    app.router.default = state.proxy
    app.add_middleware(Gateway, state=state, settings=listener)
    if listener.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=listener.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app
