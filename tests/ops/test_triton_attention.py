"""What a query gets from the Triton kernels depends on its own keys alone: not on company, chunks or programs."""

from __future__ import annotations

import dataclasses
from typing import Any

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


def run(
    case: PagedCase,
    first: int,
    last: int,
    query_lens: list[int],
    context_lens: list[int],
    num_answer_tokens: int | None = None,
) -> torch.Tensor:
    """Sequences first .. last of a case as a batch of their own, with other chunks of the same tokens."""
    start = sum(case.batch.query_lens[:first])
    batch = dataclasses.replace(make_batch(query_lens, context_lens), num_answer_tokens=num_answer_tokens)
    moved = {name: getattr(batch, name).to(DEVICE) for name in ("cu_seqlens_q", "context_lens", "positions")}
    return paged_attention(
        case.query[start : start + sum(query_lens)].to(DEVICE),
        case.key_cache.to(DEVICE),
        case.value_cache.to(DEVICE),
        dataclasses.replace(batch, **moved),
        case.block_tables[first:last].to(DEVICE),
        **{name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in case.options.items()},
    )


@pytest.mark.parametrize("options", [{}, {"window": 700}, {"sinks": True, "soft_cap": 2.0}])
def test_a_single_token_is_the_same_alone_and_in_company(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = [1, 40, 512, 513, 1300]
    case = attention_case([1] * 5, contexts, **options, **SHAPE)
    together = run(case, 0, 5, [1] * 5, contexts)
    for i, context in enumerate(contexts):
        assert torch.equal(run(case, i, i + 1, [1], [context])[0], together[i])
    monkeypatch.setattr(attention, "_PROGRAMS", 1)  # one program for all spans of a sequence
    assert torch.equal(run(case, 0, 5, [1] * 5, contexts), together)


@pytest.mark.parametrize(
    "options", [{}, {"window": 150}, {"sinks": True, "soft_cap": 2.0}, {"head_dim": 128}, {"head_dim": 128, "heads": 2}]
)
def test_a_chunk_is_the_same_in_pieces(options: dict[str, Any]) -> None:
    case = attention_case([300], [420], **(SHAPE | options))
    whole = run(case, 0, 1, [300], [420])
    for pieces in ([150, 150], [37, 200, 63], [2, 298], [299, 1]):
        done, found = 0, []
        for length in pieces:
            part = case._replace(query=case.query[done : done + length], batch=make_batch([length], [420]))
            done += length
            found.append(run(part, 0, 1, [length], [120 + done], num_answer_tokens=0))
        assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"block_size": 64, "head_dim": 64}, {"block_size": 128}])
def test_chunks_of_wide_heads_equal_the_reference(options: dict[str, Any]) -> None:
    """Shapes for which Hopper has a kernel of its own, with NaN behind every context."""
    lengths, contexts = [1, 40, 150, 7], [300, 40, 290, 130]
    case = attention_case(lengths, contexts, strided=True, **(SHAPE | {"head_dim": 128} | options))
    want = paged_attention.reference(*case.args, **case.options)
    torch.testing.assert_close(run(case, 0, 4, lengths, contexts).cpu(), want, rtol=2**-6, atol=2e-2)


def test_chunks_are_the_same_alone_and_in_company_again_and_again() -> None:
    """More tiles than a GPU has programs at once, of one block of keys, two and more, whole and not."""
    lengths = [2, 3] if INTERPRETING else [2, 300, 64, 65, 128, 129, 192, 256, 257, 511] * 6
    contexts = [length + 13 * (i % 5) for i, length in enumerate(lengths)]
    case = attention_case(lengths, contexts, **(SHAPE | {"head_dim": 128, "heads": 16, "kv_heads": 8}))
    alone = [run(case, i, i + 1, [lengths[i]], [contexts[i]]) for i in range(len(lengths))]
    for _ in range(1 if INTERPRETING else 20):
        assert torch.equal(run(case, 0, len(lengths), lengths, contexts), torch.cat(alone))


def test_one_sink_far_above_all_scores_leaves_nothing_and_one_far_below_changes_nothing() -> None:
    case = attention_case([1, 40], [70, 90], sinks=True, **SHAPE)
    got = {}
    for sink in (float("-inf"), -1e4, 1e4):
        case.options["sinks"].fill_(sink)
        got[sink] = run(case, 0, 2, [1, 40], [70, 90])
    del case.options["sinks"]
    without = run(case, 0, 2, [1, 40], [70, 90])
    assert torch.equal(got[float("-inf")], without)
    assert torch.equal(got[-1e4], without)
    assert torch.equal(got[1e4], torch.zeros_like(without))


def test_sinks_of_another_dtype_are_refused() -> None:
    case = attention_case([1], [7], sinks=True, **SHAPE)
    arguments = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in case.args]
    options = case.options | {"sinks": case.options["sinks"].bfloat16().to(DEVICE)}
    assert "bfloat16" in paged_attention.explain(*arguments, **options)["triton"]


def test_unknown_dtypes_are_refused() -> None:
    case = attention_case([1], [7], **SHAPE)
    arguments = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in case.args]
    arguments[0] = arguments[0].double()
    assert "float64" in paged_attention.explain(*arguments, **case.options)["triton"]
