"""What requests to generate have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0)]


class RequestModel(BaseModel):
    """A request's body. Types are strict, null means unset, and what nobody knows is kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True, protected_namespaces=())

    def unknown(self) -> list[str]:
        """The names of fields that mean nothing here."""
        return list(self.model_extra or ())


class StreamOptions(RequestModel):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    """End with a chunk that has no choices and counts the tokens."""
    continuous_usage_stats: bool | None = None
    """Count the tokens in every chunk."""


class JSONSchema(RequestModel):
    """A schema with OpenAI's wrapping."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class SamplingFields(RequestModel):
    """How tokens are drawn and when the answer ends; `rorqual.sampling_params` explains and checks the values."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


class GenerationRequest(SamplingFields):
    """What chat and plain completions share."""

    model: str | None = None
    """A name from /v1/models. Default: the server's only model."""
    stream: bool | None = None
    """Send the answer as server-sent events while it comes."""
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """One of json, json_object, regex, grammar or choice, as vLLM names them."""
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    cache_salt: str | None = None
    """Prompts share cached prefixes only with equal salts."""
    return_token_ids: bool | None = None
    """Add the ids of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in logprobs "token_id:123"."""
    user: str | None = None
    """Accepted and not used."""
