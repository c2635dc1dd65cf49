"""Engines for tests: tiny models on small caches, and a scripted model that emits given tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers

from rorqual import LLM
from rorqual.batch import Batch
from rorqual.engine.cuda_graphs import Decoded
from tests.tiny import VOCAB, checkpoint_folder

TINY_OPTIONS: dict[str, Any] = {
    "threads": 1,  # tiny matrices gain nothing from two, and a busy machine loses much
    "dtype": "float32",
    "block_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "num_kv_blocks": 64,
    "skip_tokenizer_init": True,
    "progress": False,
}


def tiny_llm(name: str = "llama", **options: Any) -> LLM:
    """A tiny random model in float32; see tests/tiny.py for the names."""
    return LLM(str(checkpoint_folder(name)), **(TINY_OPTIONS | options))


class ScriptedRunner:
    """Stands in for the model: a sequence whose first prompt token is t continues with scripts[t].

    It learns which sequence a row belongs to from its own paged cache, so preemption and prefix hits are real.
    After its script a sequence repeats the last token. `spoil` holds first tokens whose logits become NaN.
    """

    def __init__(self, llm: LLM, scripts: Mapping[int, Sequence[int]], prompt_lens: Mapping[int, int]) -> None:
        self.scripts, self.prompt_lens, self.spoil = scripts, prompt_lens, set[int]()
        self.block_size, self.vocab_size = llm.engine.resolved.block_size, llm.engine.vocab_size
        self.slots: dict[int, int] = {}
        self.model, self.resolved = llm.engine._runner.model, llm.engine.resolved

    draws = False

    def decode(self, batch: Batch) -> Decoded:
        return Decoded(self.run(batch), None)

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        return self.run(batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def run(self, batch: Batch) -> torch.Tensor:
        slots, tables = batch.caches[0]
        self.slots.update(zip(slots.tolist(), batch.input_ids.tolist(), strict=True))
        owners = torch.repeat_interleave(torch.arange(len(batch.query_lens)), torch.tensor(batch.query_lens))
        logits = torch.full((len(batch.logits_indices), self.vocab_size), -10.0)
        for row, index in zip(logits, batch.logits_indices.tolist(), strict=True):
            first = self.slots[int(tables[owners[index], 0]) * self.block_size]
            step = int(batch.positions[index]) + 1 - self.prompt_lens[first]
            script = self.scripts[first]
            row[script[min(max(step, 0), len(script) - 1)]] = 10.0
            if first in self.spoil:
                row.fill_(float("nan"))
        return logits


def scripted_llm(
    scripts: Mapping[int, Sequence[int]], *, prompt_lens: Mapping[int, int] | None = None, **options: Any
) -> tuple[LLM, ScriptedRunner]:
    """An LLM whose model follows scripts; prompts have one token unless prompt_lens says otherwise."""
    llm = tiny_llm("llama", **options)
    runner = ScriptedRunner(llm, scripts, prompt_lens or dict.fromkeys(scripts, 1))
    llm.engine._runner = runner  # type: ignore[assignment]
    return llm, runner


def byte_tokenizer(special: Sequence[str] = ()) -> BackendTokenizer:
    """Byte-level BPE without merges, cut to the tiny vocabulary: each of the first bytes is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (c != "Ġ", c))  # the space must not be cut off
    alphabet = alphabet[: VOCAB - len(special)]
    backend = BackendTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend
