"""Models split over ranks: the same logits on every rank, to the bit, and those of one rank up to rounding."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from tests.distributed.ranks import connect, on_ranks
from tests.models.scattered import loaded_model, logits_by_chunks, tokens
from tests.tiny import CONFIGS, DEEPSEEK_CONFIGS, random_deepseek, random_model

NUM_ANSWER = 6


class Case(NamedTuple):
    """A model in a folder, how to build it, and a text: a prompt, and what one rank answers."""

    folder: Path
    options: dict[str, Any]
    text: list[int]

    @property
    def num_prompt(self) -> int:
        """Tokens of the text that are no answer."""
        return len(self.text) - NUM_ANSWER


# Heads and widths that four ranks can share; two heads of keys and values, of which four ranks have copies.
_SHARED: dict[str, dict[str, Any]] = {
    name: {"num_attention_heads": 8} if model_type in ("llama", "mistral", "qwen2") else {}
    for name, (model_type, _) in CONFIGS.items()
}
_SHARED["mistral_window"] |= {"num_key_value_heads": 4}
_SHARED["deepseek_v4"] = {"o_groups": 4}


@functools.cache
def case_of(name: str) -> Case:
    """A tiny model, its sizes made even, with a text to which it has given the answers."""
    model_type, options = (CONFIGS | DEEPSEEK_CONFIGS)[name]
    make = random_deepseek if name in DEEPSEEK_CONFIGS else random_model
    folder = Path(tempfile.mkdtemp(prefix=f"rorqual-shared-{name}-"))
    make(model_type, options | _SHARED.get(name, {})).save_pretrained(folder)
    return answered(folder, num_prompt=150 if model_type == "deepseek_v4" else 45)


def answered(folder: Path, *, num_prompt: int = 45, **options: Any) -> Case:
    """The case of a folder."""
    model, text = loaded_model(folder, **options), tokens(num_prompt)
    for _ in range(NUM_ANSWER):
        text.append(int(logits_by_chunks(model, text, len(text))[-1].argmax()))
    return Case(folder, options, text)


def logits_of(case: Case, mesh: Mesh) -> torch.Tensor:
    """[num_tokens, vocabulary], the prompt in four chunks and every token of the answer in a step of its own."""
    model = loaded_model(case.folder, mesh=mesh, **case.options)
    return logits_by_chunks(model, case.text, 1, num_prompt=case.num_prompt, at_once=range(3, case.num_prompt))


def on_rank(rank: int, store: Any, size: int, cases: dict[str, Case]) -> dict[str, torch.Tensor]:
    """The logits of every case on one of the ranks."""
    mesh = connect(rank, store, tp=size)
    return {name: logits_of(case, mesh) for name, case in cases.items()}


def check(size: int, cases: dict[str, Case], *, within: float = 1e-4) -> None:
    """All ranks agree to the bit, with one rank up to rounding, and about every token of the answers."""
    found = on_ranks(size, on_rank, size, cases)
    for name, case in cases.items():
        first, *others = (logits[name] for logits in found)
        alone = logits_of(case, Mesh.single())
        assert first.shape == alone.shape, name
        assert all(torch.equal(first, other) for other in others), f"ranks differ: {name}"
        assert float((first - alone).abs().max()) < within, name
        answers = first[case.num_prompt - 1 : -1].argmax(-1).tolist()
        assert answers == case.text[case.num_prompt :], name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_have_the_logits_of_one(size):
    check(size, {name: case_of(name) for name in (*CONFIGS, *DEEPSEEK_CONFIGS)})
