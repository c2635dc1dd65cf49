"""The HTTP server as an ASGI app, over any `EngineClient`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from rorqual.server import chat, completions, errors, health, models, page, responses, tokens
from rorqual.server.connection import GONE, ClientGone
from rorqual.server.engine_client import EngineClient
from rorqual.server.gateway import Gateway
from rorqual.server.metrics import ServerMetrics
from rorqual.server.response_store import ResponseStore
from rorqual.server.serving import Serving
from rorqual.server.settings import ServerSettings
from rorqual.server.stats_line import log_stats
from rorqual.tokenizer.tokenizer import Tokenizer


def create_app(engine: EngineClient, settings: ServerSettings, tokenizer: Tokenizer) -> FastAPI:
    """The app. It may be served before the engine is ready: until then requests get 503."""
    metrics = ServerMetrics(engine, model_name=settings.served_model_name[0] if settings.served_model_name else None)
    state = Serving(metrics.watch(engine), settings, tokenizer)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        logging = (
            None if settings.disable_log_stats else asyncio.create_task(log_stats(engine, settings.stats_interval))
        )
        yield
        if logging is not None:
            logging.cancel()

    app = FastAPI(
        title="Rorqual",
        version=metadata.version("rorqual"),
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.serving, app.state.metrics, app.state.responses = state, metrics, ResponseStore()
    errors.install(app)
    app.add_exception_handler(ClientGone, _nobody_reads)
    for router in (chat.router, completions.router, responses.router, models.router, tokens.router, health.router):
        app.include_router(router)
    if settings.enable_reset_prefix_cache:
        app.include_router(health.reset_router)
    app.include_router(metrics.router(), responses=errors.DECLARED)
    app.include_router(page.router())
    app.add_middleware(
        Gateway,
        state=state,
        settings=settings,
        keys=settings.api_key,
        request_ids=settings.enable_request_id_headers,
    )
    if settings.allowed_origins:  # outside, so that pages can read errors too
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _nobody_reads(_request: object, _error: Exception) -> Response:
    return Response(status_code=GONE)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The API's description, without the 422 that FastAPI adds and this server never sends."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema
