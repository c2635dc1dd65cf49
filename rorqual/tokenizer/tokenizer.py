"""The tokenizer: text to ids, ids to text, chats to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from rorqual.tokenizer.chat_template import ChatTemplates, Message
from rorqual.tokenizer.detokenizer import Detokenizer, TokenText
from rorqual.tokenizer.folder_tokenizer import parts_from_folder
from rorqual.tokenizer.gguf_tokenizer import parts_from_gguf
from rorqual.tokenizer.parts import TokenizerParts


class Tokenizer:
    """A model's tokenizer, over Hugging Face's `tokenizers`. Make one with `from_folder` or `from_gguf`."""

    bos_token_id: int | None
    """The id that begins a text, or None."""
    eos_token_ids: tuple[int, ...]
    """Every id that the tokenizer itself says ends a turn; a model's generation config may add more."""
    special_token_ids: frozenset[int]
    """Ids that `skip_special_tokens` leaves out."""

    def __init__(self, parts: TokenizerParts, *, chat_template: str | None = None) -> None:
        self._backend = parts.backend
        self._named_tokens = dict(parts.named_tokens)
        self._chat_templates = ChatTemplates(parts.chat_templates, parts.named_tokens, override=chat_template)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        added = parts.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read tokenizer.json or tokenizer.model, and the configs and templates beside it.

        Args:
            folder: a checkpoint's folder.
            chat_template: instead of the model's own: a Jinja file's path, a template's text, or the name of one of
                the model's templates.

        Raises:
            ValueError: no tokenizer there, a broken file, or no such template.
        """
        return cls(parts_from_folder(Path(folder)), chat_template=chat_template)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, chat_template: str | None = None) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        Args:
            metadata: plain Python values by GGUF key.
            chat_template: as in `from_folder`.

        Raises:
            ValueError: an unknown model or pre-tokenizer, broken metadata, or no such template.
        """
        return cls(parts_from_gguf(metadata), chat_template=chat_template)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1. A model's embedding may have more rows than that."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def _token_text(self) -> TokenText:
        return TokenText(self._backend, self.special_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written out in it become their ids.

        Args:
            text: any Unicode text.
            add_special_tokens: whether to add BOS and EOS as the tokenizer is set up to.

        Raises:
            ValueError: the text is not valid Unicode (it has half of a surrogate pair).
        """
        try:
            # Of the backend's ways to encode, only those for batches let other threads run meanwhile.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            what = "lone surrogates" if isinstance(text, str) else type(text).__name__
            raise ValueError(f"a prompt must be text in valid Unicode, got {what}: clean it first") from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all `token_ids` as one text; bytes that are no character are U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token's text on its own: special tokens by name, a lone byte as U+FFFD, "" for an id without a token."""
        return self._token_text.text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, in UTF-8: part of a character, maybe; special tokens by name."""
        return self._token_text.bytes(token_id)

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by role, as chat templates know them: {"bos_token": "<s>", ...}."""
        return self._named_tokens

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The chat templates' sources by name; the usual one is called "default"."""
        return self._chat_templates.sources

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with the chat template of this text. Raises ValueError if it is no Jinja template."""
        if "{{" not in source and "{%" not in source:
            raise ValueError(f"chat_template must be a Jinja template's text, got {source!r}")
        other = copy(self)
        other._chat_templates = ChatTemplates({}, self._named_tokens, override=source)
        return other

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A stream for the ids of one answer.

        Raises:
            ValueError: this tokenizer's decoder cannot be streamed.
        """
        return self._token_text.detokenizer(skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt for a chat. See `ChatTemplates.render` for the arguments and errors."""
        return self._chat_templates.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """The ids of `render_chat`'s prompt. BOS is there once if the template writes it, and never twice."""
        prompt = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **template_kwargs,
        )
        return self.encode(prompt, add_special_tokens=False)
