"""What a query gets from the Triton kernels depends on its own keys alone: not on company, chunks or programs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rorqual.ops.attention import paged_attention
from rorqual.ops.registry import load_backends
from rorqual.ops.triton.launch import INTERPRETING, available
from tests.ops.paged_cases import PagedCase, attention_case, make_batch

if not available():
    pytest.skip("needs Triton, and a GPU or its interpreter", allow_module_level=True)
load_backends("triton")
from rorqual.ops.triton import attention  # noqa: E402

pytestmark = [] if INTERPRETING else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETING else "cuda"
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": torch.bfloat16, "layout": "heads"}


def run(case: PagedCase, first: int, last: int, query_lens: list[int], context_lens: list[int]) -> torch.Tensor:
    """Sequences first .. last of a case as a batch of their own, with other chunks of the same tokens."""
    start = sum(case.batch.query_lens[:first])
    batch = make_batch(query_lens, context_lens)
    moved = {name: getattr(batch, name).to(DEVICE) for name in ("cu_seqlens_q", "context_lens", "positions")}
    return paged_attention(
        case.query[start : start + sum(query_lens)].to(DEVICE),
        case.key_cache.to(DEVICE),
        case.value_cache.to(DEVICE),
        dataclasses.replace(batch, **moved),
        case.block_tables[first:last].to(DEVICE),
        **case.options,
    )


@pytest.mark.parametrize("window", [None, 700])
def test_a_single_token_is_the_same_alone_and_in_company(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [1, 40, 512, 513, 1300]
    case = attention_case([1] * 5, contexts, window=window, **SHAPE)
    together = run(case, 0, 5, [1] * 5, contexts)
    for i, context in enumerate(contexts):
        assert torch.equal(run(case, i, i + 1, [1], [context])[0], together[i])
    monkeypatch.setattr(attention, "_PROGRAMS", 1)  # one program for all spans of a sequence
    assert torch.equal(run(case, 0, 5, [1] * 5, contexts), together)


@pytest.mark.parametrize("window", [None, 150])
def test_a_chunk_is_the_same_in_pieces(window: int | None) -> None:
    case = attention_case([300], [420], window=window, **SHAPE)
    whole = run(case, 0, 1, [300], [420])
    for pieces in ([150, 150], [37, 200, 63], [2, 298]):
        done, found = 0, []
        for length in pieces:
            part = case._replace(query=case.query[done : done + length], batch=make_batch([length], [420]))
            done += length
            found.append(run(part, 0, 1, [length], [120 + done]))
        assert torch.equal(torch.cat(found), whole)


def test_unknown_dtypes_are_refused() -> None:
    case = attention_case([1], [7], **SHAPE)
    arguments = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in case.args]
    arguments[0] = arguments[0].double()
    assert "float64" in paged_attention.explain(*arguments, **case.options)["triton"]
