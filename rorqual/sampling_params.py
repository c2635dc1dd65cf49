"""How one request's tokens are chosen and when it ends. vLLM's field names; checked on construction. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from rorqual.config import StrictModel

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the best token wins by e^(gap/T), and gap/T would leave float32's range."""

MAX_LOGIT_BIAS = 100.0

_WAY_OUT = {
    "n": "1 is one answer",
    "temperature": "0 is greedy, 1.0 is the model's own distribution",
    "top_p": "1.0 is off; for the best token only, set temperature to 0",
    "top_k": "0 or -1 is off",
    "min_p": "0 is off",
    "presence_penalty": "0 is off",
    "frequency_penalty": "0 is off",
    "repetition_penalty": "1.0 is neutral",
    "seed": "None is a different draw every time",
    "stop": "None is no stop string",
    "min_tokens": "0 is no minimum",
    "max_tokens": "None fills the context",
    "logprobs": "None is no logprobs, 0 is the chosen token's alone",
    "prompt_logprobs": "None is no logprobs, 0 is the prompt tokens' alone",
    "allowed_token_ids": "None allows every token",
}


def _mask_seed(seed: int) -> int:
    return seed & 0xFFFF_FFFF_FFFF_FFFF


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise ValueError("must be a string or a list of strings")
    if "" in strings:
        raise ValueError("must hold no empty string: it would match before the first token")
    return tuple(strings)


def _token_bias(bias: Any) -> Any:
    """Read {"50": 1} as {50: 1}, as JSON's keys are strings; refuse ids and values that no model could take."""
    if not isinstance(bias, dict):
        return bias  # None, or pydantic's own sentence
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit()
        if not digits and (not isinstance(key, int) or isinstance(key, bool) or key < 0):
            raise ValueError(f"keys must be token ids, 0 or larger, but one is {key!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_LOGIT_BIAS:
            raise ValueError(f"values must be numbers from -100 (never) to 100 (always), but token {key} has {value!r}")
        if int(key) in by_id:
            raise ValueError(f"must name each token once, but token {int(key)} is there twice")
        by_id[int(key)] = float(value)
    return by_id


def _no_empty_word(words: list[str]) -> list[str]:
    if any(not word.strip() for word in words):
        raise ValueError("must hold no empty or blank word: it would forbid every answer")
    return words


def _json_schema(schema: Any) -> Any:
    """Read a schema that is given as text; what a schema may say is the grammar compiler's to judge."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"must be a JSON schema, and this text is not JSON ({error})") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("must be a JSON schema: an object, true or false, or its text")
    if isinstance(schema, dict) and not all(isinstance(name, str) for name in schema):
        raise ValueError("must be a JSON schema, whose keys are strings")
    return schema


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty: leave it out for free text")
    return text


class StructuredOutputs(StrictModel):
    """The form that an answer must have: exactly one field is given. vLLM's names."""

    model_config = ConfigDict(strict=True)

    json_schema: Annotated[dict[str, Any] | bool, BeforeValidator(_json_schema)] | None = Field(None, alias="json")
    """A JSON schema, or its text; the answer is a value that it allows. Given as `json`."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    regex: Annotated[str, AfterValidator(_not_blank)] | None = None
    """A regular expression that the whole answer matches."""
    grammar: Annotated[str, AfterValidator(_not_blank)] | None = None
    """A context-free grammar in Lark's or GBNF's notation; its first rule is called start, or root."""
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    """One of these strings."""

    @model_validator(mode="before")
    @classmethod
    def _read_back(cls, given: Any) -> Any:
        """Take what `model_dump` says too, where `json`, which pydantic's models have a method of, is `json_schema`."""
        if isinstance(given, dict) and "json_schema" in given and "json" not in given:
            return {"json" if name == "json_schema" else name: value for name, value in given.items()}
        return given

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        names = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(names) != 1:
            got = " and ".join(names).replace("json_schema", "json") or "none"
            raise ValueError(f"must have exactly one of json, json_object, regex, grammar and choice, got {got}")
        return self

    @classmethod
    def _sentence(cls, error: Any) -> str:
        where = ".".join(str(part) for part in error["loc"][:1])
        if error["type"] == "extra_forbidden" or not where:
            return super()._sentence(error)
        kinds = {
            "literal_error": "must be true, or left out",
            "string_type": "must be a string",
            "list_type": "must be a list of strings",
            "too_short": "must hold at least one string",
        }
        if len(error["loc"]) > 1 and where == "choice":
            return f"choice must be a list of strings, got {error['input']!r} in it"
        return f"{where} {kinds.get(error['type'], str(error['msg']).removeprefix('Value error, '))}"


def _structured(given: Any) -> Any:
    if isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, dict):
        raise ValueError("must be StructuredOutputs, or an object with its fields")
    if not all(isinstance(name, str) for name in given):
        raise ValueError("must have names for keys")
    return StructuredOutputs(**given)


def _moderate(factor: float) -> float:
    if not 1e-6 <= factor <= 1e6:
        raise ValueError("must be from 0.000001 to 1000000: logits would become infinite")
    return factor


Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]
LogprobCount = Annotated[int, Field(ge=0)]


class SamplingParams(StrictModel):
    """Sampling options of one request. Frozen; a wrong value raises ValueError with one sentence.

    Types are strict: True is no number, "1" is no number, and neither NaN nor infinity is one.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    n: Annotated[int, Field(ge=1)] = 1
    """Answers per prompt."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits. 0, and anything below 1e-5, takes the most likely token (ties: the lowest id)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the fewest most likely tokens whose probabilities add up to this. 1.0: off."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Draw from this many most likely tokens. 0 or -1: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw from the tokens at least this share as likely as the best one. 0: off."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of every token that the answer holds. The prompt does not count."""
    frequency_penalty: Penalty = 0.0
    """Subtracted once per time that the answer holds the token. The prompt does not count."""
    repetition_penalty: Annotated[float, Field(gt=0), AfterValidator(_moderate)] = 1.0
    """Divides positive and multiplies negative logits of tokens that the prompt or the answer holds. 1.0: neutral."""
    logit_bias: Annotated[dict[int, float], BeforeValidator(_token_bias)] | None = None
    """Token id (or its digits as a string) -> number from -100 to 100 that is added to its logit."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    """Only these tokens can be drawn."""
    bad_words: Annotated[list[str], AfterValidator(_no_empty_word)] | None = None
    """Words that the answer never completes."""
    seed: Annotated[int, AfterValidator(_mask_seed)] | None = None
    """Makes the draw repeatable; any integer, taken modulo 2**64. None: a different draw every time."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = ()
    """A string or list of strings; the answer ends before the first of them. Read back as a tuple."""
    stop_token_ids: list[TokenId] | None = None
    """Tokens that end the answer, besides the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-text tokens."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens to generate before an end-of-text or stop token may be drawn."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate. None: until the context is full (vLLM's default is 16)."""
    structured_outputs: Annotated[StructuredOutputs, BeforeValidator(_structured)] | None = None
    """The form that the answer must have: one of json, json_object, regex, grammar and choice, as a JSON object."""
    logprobs: LogprobCount | None = None
    """Log-probabilities of this many most likely tokens, and of the chosen one, for each generated token."""
    prompt_logprobs: LogprobCount | None = None
    """The same for each token of the prompt."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted for scripts written for vLLM, whose slow tokenizers alone read it."""
    detokenize: bool = True
    """Turn the ids into text."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens}): "
                "lower the first or raise the second"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop strings need text, but detokenize is False (stop={list(self.stop)!r}): "
                "set detokenize=True, or use stop_token_ids"
            )
        return self

    @classmethod
    def _sentence(cls, error: Any) -> str:
        if error["type"] == "too_short":
            error = {**error, "msg": "must hold at least one token id"}
        if error["loc"] and error["loc"][0] == "structured_outputs":
            return f"structured_outputs: {str(error['msg']).removeprefix('Value error, ')}"  # its value may be long
        sentence = super()._sentence(error)
        hint = _WAY_OUT.get(str(error["loc"][0])) if error["loc"] else None
        return f"{sentence} ({hint})" if hint else sentence

    @property
    def penalised(self) -> bool:
        """Whether what was there before changes what may come."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def clone(self, **changes: Any) -> Self:
        """A copy with these fields changed, checked like a new one; fields never set stay unset."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)

    def validate_for(self, vocab_size: int, max_logprobs: int) -> None:
        """Raise ValueError for what one model cannot serve: ids outside its vocabulary, too many logprobs."""
        id_lists: dict[str, Sequence[int] | dict[int, float] | None] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in id_lists.items():
            if ids and (largest := max(ids)) >= vocab_size:
                raise ValueError(
                    f"{name} must hold ids of this model's vocabulary, 0 to {vocab_size - 1}, got {largest}: remove it"
                )
        for name, count in {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}.items():
            if count is not None and count > max_logprobs:
                raise ValueError(
                    f"{name} must be at most {max_logprobs}, got {count}: "
                    "ask for fewer, or raise the engine's max_logprobs"
                )
