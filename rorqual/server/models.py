"""/v1/models: the names under which the one model can be asked."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rorqual.server.errors import DECLARED
from rorqual.server.schemas.answer import ModelCard, ModelList
from rorqual.server.serving import Serving, serving

router = APIRouter(tags=["OpenAI"], responses=DECLARED)


def _card(state: Serving, name: str) -> ModelCard:
    info = state.info
    return ModelCard(
        id=name, created=state.started, root=info.model_path, parent=None, max_model_len=info.max_model_len
    )


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """All names; 503 until they can be asked."""
    state = serving(request)
    return ModelList(data=[_card(state, name) for name in state.model_names])


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> ModelCard:
    """One of them."""
    state = serving(request)
    return _card(state, state.model_name(model))
