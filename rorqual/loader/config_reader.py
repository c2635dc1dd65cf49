"""Strict reading of a config.json: what a model does not honour is refused by name, never dropped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")
D = TypeVar("D")

_MISSING: Any = object()

# fmt: off
_HARMLESS = frozenset((
    # remarks
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled", "_name_or_path",
    "architectures", "attn_implementation", "auto_map", "base_model_pp_plan", "base_model_tp_plan", "dtype",
    "finetuning_task", "is_llama_config", "is_encoder_decoder", "keys_to_ignore_at_inference", "license",
    "max_sequence_length", "model_max_length", "model_type", "name_or_path", "pretraining_tp", "seq_length",
    "task_specific_params", "tf_legacy_loss", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "transformers_weights", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    "use_flash_attn",
    # the tokenizer's matter
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "prefix", "sep_token_id",
    "tokenizer_class", "unk_token_id",
    # training, and what a forward pass returns
    "attention_dropout", "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop", "gradient_checkpointing",
    "hidden_dropout", "hidden_dropout_prob", "id2label", "initializer_range", "label2id", "num_labels",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "problem_type",
    "resid_pdrop", "return_dict", "return_dict_in_generate", "router_aux_loss_coef",
    # sampling defaults, which are generation_config.json's to give
    "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
))
# fmt: on
"""Keys that cannot change logits. pretraining_tp only tells how the training was split."""

_NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "is_decoder": False,
    "partial_rotary_factor": 1.0,
    "qkv_bias": False,
    "rope_interleaved": False,
    "shared_expert_intermediate_size": 0,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}
"""Keys of published configs that ask for nothing when they hold this value."""


class ConfigReader:
    """Reads a config's keys one by one, and at the end refuses what nobody read. A null value counts as absent."""

    def __init__(self, config: Mapping[str, Any], *, model_type: str) -> None:
        self._config, self._model_type = config, model_type
        self._read: set[str] = set()

    @overload
    def take(self, key: str, kind: Callable[[Any], T], *, aliases: Sequence[str] = ()) -> T: ...
    @overload
    def take(self, key: str, kind: Callable[[Any], T], default: D, *, aliases: Sequence[str] = ()) -> T | D: ...
    def take(
        self, key: str, kind: Callable[[Any], Any], default: Any = _MISSING, *, aliases: Sequence[str] = ()
    ) -> Any:
        """The value of `key` or one of its aliases.

        Args:
            key: as config.json spells it.
            kind: int, float (also takes an int), bool, str, list or dict, which the value must be; or a function that
                reads the value and raises ValueError if it is not allowed.
            default: what an absent key means; without one the key is required.
            aliases: other spellings; if two are present they must agree.

        Raises: ValueError naming the key: absent, of another type, or contradicted by an alias.
        """
        self._read.update((key, *aliases))
        found = [name for name in (key, *aliases) if self._config.get(name) is not None]
        if not found:
            if default is _MISSING:
                spelled = " or ".join((key, *aliases))
                raise ValueError(f"config.json of model_type {self._model_type!r} lacks {spelled}")
            return default
        name, value = found[0], self._config[found[0]]
        for other in found[1:]:
            if self._config[other] != value:
                raise ValueError(
                    f"config.json says {name} = {value!r} and {other} = {self._config[other]!r}; they mean the same, "
                    f"so drop one: --hf-overrides '{{\"{other}\": null}}'"
                )
        if isinstance(kind, type):
            return _checked(name, value, kind)
        try:
            return kind(value)
        except ValueError as error:
            raise ValueError(f"config.json: {name}: {error}") from error

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse any value of `key` but the allowed ones; absent is fine."""
        self._read.add(key)
        value = self._config.get(key)
        if value is not None and not any(_same(value, choice) for choice in allowed):
            choices = " or ".join(repr(choice) for choice in allowed)
            raise ValueError(f"{key} must be {choices} for model_type {self._model_type!r}, got {value!r}")

    def ignore(self, *keys: str) -> None:
        """These are read elsewhere, or do not matter."""
        self._read.update(keys)

    def finish(self) -> None:
        """Refuse what nobody read.

        Raises: ValueError naming every key that was not read, has a value, and could change results.
        """
        unread = {key: value for key, value in self._config.items() if key not in self._read and self._matters(key)}
        for key in ("quantization_config", "compression_config", "quantization"):
            if key in unread:
                value = unread[key]
                method = value.get("quant_method", "unnamed") if isinstance(value, dict) else value
                raise ValueError(
                    f"{key} ({method}) is not supported for model_type {self._model_type!r}: "
                    "take an unquantised checkpoint or a GGUF file"
                )
        if unread:
            shown = ", ".join(f"{key} = {_short(value)}" for key, value in unread.items())
            way_out = json.dumps(dict.fromkeys(unread))
            raise ValueError(
                f"config.json has keys that model_type {self._model_type!r} does not honour here: {shown}; "
                f"if the model works without them, add --hf-overrides '{way_out}'"
            )

    def _matters(self, key: str) -> bool:
        value = self._config[key]
        if value is None or value in ([], {}) or key in _HARMLESS:
            return False
        return not (key in _NEUTRAL and _same(value, _NEUTRAL[key]))


def _checked(key: str, value: Any, kind: type) -> Any:
    """The value if it is what JSON means by `kind`: true is no number, and every finite number is a float."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if isinstance(value, kind) and kind is not float and not (isinstance(value, bool) and kind is not bool):
        return value
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string", list: "a list"}
    raise ValueError(f"config.json: {key} must be {names.get(kind, 'an object')}, got {value!r}")


def _same(value: Any, other: Any) -> bool:
    """Equality that tells true from 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
