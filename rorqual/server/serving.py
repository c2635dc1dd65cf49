"""What all routes share: the engine, the tokenizer, the settings, and who may submit what."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request

from rorqual.server.engine_client import EngineClient
from rorqual.server.errors import APIError
from rorqual.server.messages import EngineInfo
from rorqual.server.settings import ServerSettings
from rorqual.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("rorqual.server")


class Serving:
    """The server's state; routes get it by `serving(request)`."""

    def __init__(self, engine: EngineClient, settings: ServerSettings, tokenizer: Tokenizer) -> None:
        self.engine, self.settings, self.tokenizer = engine, settings, tokenizer
        self.draining = False
        """Whether no new requests are taken."""
        self.num_answers = 0
        """Answers that wait or run."""
        self._said: set[str] = set()

    @property
    def info(self) -> EngineInfo:
        """Of the model. Raises APIError (503) while there is none."""
        if self.engine.state == "loading":
            raise APIError(503, "the model is loading: try again in a while", code="loading")
        return self.engine.info

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.settings.served_model_name or (self.info.model_path,)

    def model_name(self, asked: str | None) -> str:
        """The name for the answer. Raises APIError (404)."""
        names = self.model_names
        if asked and asked not in names:
            raise APIError(
                404,
                f"there is no model {asked!r}: this server has {', '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        return asked or names[0]

    def log_once(self, key: str, message: str, *arguments: Any) -> None:
        """Log a line the first time that this key is seen."""
        if key not in self._said and len(self._said) < 1000:
            self._said.add(key)
            log.warning(message, *arguments)


def serving(request: Request) -> Serving:
    """The state of the app that a request came to."""
    state: Serving = request.app.state.serving
    return state
