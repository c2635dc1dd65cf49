"""What answers to all kinds of requests have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    """Part of an answer. Only what was set is sent."""

    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)

    def to_json(self) -> str:
        """As it is sent."""
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(AnswerModel):
    """Of the prompt's tokens."""

    cached_tokens: int = 0
    """Those found in the prefix cache."""


class Usage(AnswerModel):
    """What was read and written, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Usage:
        """From the counts; `cached_tokens` is None while it is not known."""
        usage = cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )
        if cached_tokens is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached_tokens)
        return usage


class PromptLogprob(AnswerModel):
    """One candidate for one token of the prompt, as vLLM shows it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per token of the prompt, its candidates by id; the first is null."""


class ModelCard(AnswerModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rorqual"
    root: str
    """Where it was loaded from."""
    parent: str | None = None
    max_model_len: int


class ModelList(AnswerModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
