"""The ways in which a request asks for text of a given form, as one."""

from __future__ import annotations

from typing import Any

from rorqual.server.errors import bad_value
from rorqual.server.schemas.request import GenerationRequest


def structured_outputs(request: GenerationRequest) -> tuple[str, dict[str, Any] | None]:
    """The field that asks, and what `StructuredOutputs` is made of; None for free text.

    Raises: APIError (400) for more than one form.
    """
    forms: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and request.response_format.type != "text":
        forms["response_format"] = _response_format(request)
    if request.structured_outputs is not None:
        forms["structured_outputs"] = {k: v for k, v in request.structured_outputs.items() if v is not None}
    for name in ("json", "regex", "grammar", "choice"):
        value = getattr(request, f"guided_{name}")
        if value is not None:
            forms[f"guided_{name}"] = {name: value}
    if not forms:
        return "structured_outputs", None
    if len(forms) > 1:
        raise bad_value(f"only one form can be asked for, got {' and '.join(forms)}", param=list(forms)[1])
    return next(iter(forms.items()))


def _response_format(request: GenerationRequest) -> dict[str, Any]:
    assert request.response_format is not None
    if request.response_format.type == "json_object":
        return {"json_object": True}
    wrapped = request.response_format.json_schema
    if wrapped is None or wrapped.schema_ is None:
        raise bad_value(
            "response_format.json_schema.schema is required with the type 'json_schema'",
            param="response_format.json_schema.schema",
        )
    return {"json": wrapped.schema_}
