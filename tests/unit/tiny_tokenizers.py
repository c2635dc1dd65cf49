"""Small real tokenizers in the shapes of well-known models, and the same ones as GGUF metadata."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello world, the quick brown fox jumps over the lazy dog. It's 1234567 o'clock, we'll see 42 dogs!",
    "def f(x):\n    return x  # four   spaces\n\n\tand a tab\r\n",
    "Grüße aus Köln, déjà vu, naïve façade, 日本語のテキスト、ひらがな。 삼겹살 한국어 문장입니다.",
    "Emoji: 👩‍👩‍👧‍👦 😀 🇩🇪 — dashes… “quotes” x² ½",
] * 3

TEXTS = [
    "",
    " ",
    "a",
    "Hello world",
    " leading and trailing ",
    "a    b",
    "\n\n  x\t\ty\r\n",
    "1 12 123 1234 12345 x1y22z333",
    "It's WE'LL they'RE don't",
    "déjà vu cafe\u0301 naïve",
    "日本語のテキスト、ひらがな。 삼겹살 é",
    "👩‍👩‍👧‍👦 😀 🇩🇪 ½ x² ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<s>b</s> c",
    "snake_case CamelCase HTTPServer x=y+z; // $5 <b>",
]

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_ONLY_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _ONLY_BYTES])


SHAPES: dict[str, dict[str, Any]] = {
    "gpt-2": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
    "smollm": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    },
    "llama-bpe": {"pre_tokenizer": _split(LLAMA3_PATTERN), "ignore_merges": True},
    "qwen2": {"pre_tokenizer": _split(QWEN2_PATTERN), "normalizer": normalizers.NFC()},
    "tekken": {"pre_tokenizer": _split(TEKKEN_PATTERN), "ignore_merges": True},
}


@functools.cache
def _byte_level_json(shape: str) -> str:
    options = SHAPES[shape]
    backend = Tokenizer(models.BPE(ignore_merges=options.get("ignore_merges", False)))
    backend.pre_tokenizer = options["pre_tokenizer"]
    if "normalizer" in options:
        backend.normalizer = options["normalizer"]
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return backend.to_str()


def byte_level(shape: str, *, bos: str | None = None) -> Tokenizer:
    """Byte-level BPE in the shape of a GGUF pre-tokenizer's name; `bos` is put before each text."""
    backend = Tokenizer.from_str(_byte_level_json(shape))
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


@functools.cache
def _sentencepiece_json() -> str:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    merged = dict.fromkeys(left + right for left, right in merges)
    letters = sorted(text for text in model["vocab"] if len(text) == 1)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[(left, right) for left, right in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend.to_str()


def sentencepiece_like() -> Tokenizer:
    """BPE over ▁-marked text with byte fallback, as Llama 2: letters outside ASCII are mostly bytes."""
    return Tokenizer.from_str(_sentencepiece_json())


def save(backend: Tokenizer, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Write a folder that transformers and Rorqual can read."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gguf_metadata(backend: Tokenizer, *, pre: str | None = None, **more: Any) -> dict[str, Any]:
    """The metadata that a converter would write for `backend`."""
    data = json.loads(backend.to_str())
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token["content"]: token["special"] for token in data["added_tokens"]}
    sentencepiece = pre is None

    def kind(text: str) -> int:
        if text == "<unk>":
            return 2
        if text in added:
            return 3 if added[text] else 4
        return 6 if sentencepiece and text.startswith("<0x") else 1

    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if sentencepiece else "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kind(text) for text in tokens],
    }
    if sentencepiece:
        metadata["tokenizer.ggml.scores"] = [-1000.0 if kind(t) != 1 else 258.0 - i for i, t in enumerate(tokens)]
    else:
        metadata["tokenizer.ggml.pre"] = pre
        metadata["tokenizer.ggml.merges"] = [" ".join(merge) for merge in data["model"]["merges"]]
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
