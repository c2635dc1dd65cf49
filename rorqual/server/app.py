"""The HTTP server as an ASGI app, over any `EngineClient`."""

from __future__ import annotations

from fastapi import FastAPI

from rorqual import __version__
from rorqual.server import errors
from rorqual.server.engine_client import EngineClient
from rorqual.server.serving import Serving
from rorqual.server.settings import ServerSettings
from rorqual.tokenizer.tokenizer import Tokenizer


def create_app(engine: EngineClient, settings: ServerSettings, tokenizer: Tokenizer) -> FastAPI:
    """The app. It may be served before the engine is ready: until then all but /version answer 503."""
    app = FastAPI(
        title="Rorqual",
        version=__version__,
        root_path=settings.root_path,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.serving = Serving(engine, settings, tokenizer)
    errors.install(app)
    return app
