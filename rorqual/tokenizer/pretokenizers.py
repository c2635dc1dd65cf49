"""How byte-level BPE cuts text into words before it merges, by the name that a GGUF file gives (tokenizer.ggml.pre)."""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers


class PreTokenizerKind(NamedTuple):
    """One way of cutting text into words."""

    splits: tuple[str, ...]
    """Patterns applied in turn; each match becomes a word of its own."""
    ignore_merges: bool = False
    """A word that is a token as a whole is taken as it is."""
    add_bos: bool = False
    """Whether a text begins with BOS when the file does not say."""
    nfc: bool = False
    """Whether text is brought to Unicode's composed form first."""

    def pre_tokenizer(self) -> Any:
        """The `tokenizers` object."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any | None:
        """The `tokenizers` object, or None."""
        return normalizers.NFC() if self.nfc else None


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(*, digits: str, letter: str = r"\p{L}", mark: str = "") -> str:
    """The GPT-4 family's pattern: contractions, words with one leading character, digits, punctuation, spaces."""
    return "|".join(
        [
            _CONTRACTION,
            rf"[^\r\n\p{{L}}\p{{N}}]?{letter}+",
            digits,
            rf" ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*",
            _SPACES,
        ]
    )


def _cased_words(*, digits: str, contraction: str = "") -> str:
    """The GPT-4o family's pattern: words also break where lower case is followed by upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return "|".join(
        [
            f"{lead}{_UPPER}*{_LOWER}+{contraction}",
            f"{lead}{_UPPER}+{_LOWER}*{contraction}",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            _SPACES,
        ]
    )


_GPT2 = PreTokenizerKind((_GPT2_WORDS,))
_EACH_DIGIT = PreTokenizerKind((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = PreTokenizerKind((_words(digits=r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizerKind((_words(digits=r"\p{N}"),))
_QWEN35 = PreTokenizerKind((_words(digits=r"\p{N}", letter=r"[\p{L}\p{M}]", mark=r"\p{M}"),), nfc=True)
_GPT4O = PreTokenizerKind((_cased_words(digits=r"\p{N}{1,3}", contraction=f"{_CONTRACTION}?"),))
_TEKKEN = PreTokenizerKind((_cased_words(digits=r"\p{N}"),), ignore_merges=True, add_bos=True)
_DEFAULT = PreTokenizerKind((r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))
_DEEPSEEK_V3 = PreTokenizerKind(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Han, Hiragana, Katakana
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_DEEPSEEK_CODER = PreTokenizerKind(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
)

PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _EACH_DIGIT,
    "starcoder": _EACH_DIGIT,
    "refact": _EACH_DIGIT,
    "command-r": _EACH_DIGIT._replace(nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2._replace(nfc=True),
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-coder": _DEEPSEEK_CODER,
}
