"""Whether the server lives, is ready, and how busy it is."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rorqual.server.errors import DECLARED, APIError
from rorqual.server.schemas.answer import AnswerModel
from rorqual.server.serving import Serving, serving

router = APIRouter(tags=["operations"], responses=DECLARED)
reset_router = APIRouter(tags=["operations"], responses=DECLARED)


class Status(AnswerModel):
    """All is well."""

    status: str = "ok"


class Version(AnswerModel):
    """Of Rorqual."""

    version: str


class Load(AnswerModel):
    """How busy the engine is; its own numbers are at most about a second old."""

    server_load: int
    """Answers that wait or run, as the server counts them."""
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    """0 to 1"""
    draining: bool


async def _check_engine(state: Serving) -> None:
    """Raises APIError (503) with the reason."""
    engine, timeout_s = state.engine, state.settings.health_timeout
    if engine.state == "loading":
        raise APIError(503, "the model is loading", code="loading")
    is_responsive = engine.state != "dead" and await engine.is_responsive(timeout_s)
    if engine.state == "dead":  # perhaps since it was asked
        raise APIError(503, f"the engine is dead: {engine.failure or 'it has ended'}", code="engine_dead")
    if not is_responsive:
        raise APIError(503, f"the engine has not answered for {timeout_s:g} s", code="engine_stuck")


@router.get("/health")
async def health(request: Request) -> Status:
    """200 while the engine answers between two steps; else 503 with the reason."""
    await _check_engine(serving(request))
    return Status()


@router.get("/ready")
async def ready(request: Request) -> Status:
    """200 when requests are welcome: the model has run once, and the server is not about to end."""
    state = serving(request)
    if state.draining:
        raise APIError(503, "the server is about to end", code="draining")
    await _check_engine(state)
    return Status()


@router.get("/version")
async def version() -> Version:
    """The server's version."""
    return Version(version=metadata.version("rorqual"))


@router.get("/load")
async def load(request: Request) -> Load:
    """How busy the server is."""
    state = serving(request)
    stats = state.engine.stats
    return Load(
        server_load=state.num_answers,
        num_requests_running=stats.num_running,
        num_requests_waiting=stats.num_waiting,
        kv_cache_usage=stats.kv_cache_usage,
        draining=state.draining,
    )


@reset_router.post("/reset_prefix_cache", response_class=Response)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes."""
    state = serving(request)
    state.info  # noqa: B018  (503 while there is no engine)
    await state.engine.reset_prefix_cache()
    return Response(status_code=200)
