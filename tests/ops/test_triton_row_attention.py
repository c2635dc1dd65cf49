"""What a token gets from the Triton kernels depends on its own rows alone: not on company, programs or launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rorqual.ops.registry import load_backends
from rorqual.ops.row_attention import RowList, RowRange, RowSource, row_attention
from rorqual.ops.triton.launch import INTERPRETING, available
from tests.ops.paged_cases import make_batch
from tests.ops.row_attention_cases import row_attention_case
from tests.ops.test_parity import moved

if not available():
    pytest.skip("needs Triton, and a GPU or its interpreter", allow_module_level=True)
load_backends("triton")
from rorqual.ops.triton import row_attention as launches  # noqa: E402

pytestmark = [] if INTERPRETING else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETING else "cuda"
CONTEXTS = [1, 40, 640, 641, 1300]
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "list": {"listed": 1200},
    "window and entries": {"window": 128, "ratio": 2, "sinks": True},
    "window and list": {"window": 128, "ratio": 2, "listed": 600, "sinks": True},
}


def run(args: Any, options: Any) -> torch.Tensor:
    args, options = moved((args, options), DEVICE)
    assert row_attention.explain(*args, **options)["triton"] == "ok"
    return launches.row_attention_triton(*args, **options).cpu()


def alone(args: Any, token: int, context: int) -> Any:
    """A case of sequences with one token each, without all but one of them."""
    query, sources, _ = args
    kept = []
    for cache, which in sources:
        part = [t[token : token + 1] if isinstance(t, torch.Tensor) else t for t in which]
        kept.append(RowSource(cache, RowList(*part) if isinstance(which, RowList) else RowRange(*part)))
    return query[token : token + 1], kept, make_batch([1], [context])


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_alone_and_in_company(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"dtype": torch.bfloat16, "heads": 3, "rows_per_block": 16} | KINDS[kind]
    args, options = row_attention_case([1] * len(CONTEXTS), CONTEXTS, **case)
    together = run(args, options)
    for token, context in enumerate(CONTEXTS):
        assert torch.equal(run(alone(args, token, context), options)[0], together[token])
    monkeypatch.setattr(launches, "_PROGRAMS", 1)  # one program for all spans of a token
    assert torch.equal(run(args, options), together)
    monkeypatch.setattr(launches, "_WORKSPACE", 1)  # a launch for every token
    assert torch.equal(run(args, options), together)


def test_a_token_of_longer_spans_is_the_same_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "LONG", 1280)
    contexts = [700, 1216, 1217, 2500]
    args, options = row_attention_case([1] * 4, contexts, dtype=torch.bfloat16, heads=2, rows_per_block=16)
    together = run(args, options)
    for token, context in enumerate(contexts):
        assert torch.equal(run(alone(args, token, context), options)[0], together[token])


@pytest.mark.parametrize("capacity", [641, 1280, 4095, 4096, 4160, 8192, 32768, 163840])
def test_the_workspace_holds_the_spans_of_every_token(capacity: int) -> None:
    room = launches._most_spans(capacity)
    for rows in range(641, capacity + 1, 63):
        assert launches._most_spans(rows) <= room


def test_a_prompt_is_the_same_in_pieces() -> None:
    args, options = row_attention_case([6], [700], dtype=torch.bfloat16, heads=3, rows_per_block=16)
    query, ((cache, which),), _ = args
    whole = run(args, options)
    for first, last in ((0, 1), (1, 3), (3, 6)):
        part = which._replace(stop=which.stop[first:last])
        batch = dataclasses.replace(make_batch([last - first], [694 + last]))
        got = run((query[first:last], [RowSource(cache, part)], batch), options)
        assert torch.equal(got, whole[first:last])


def test_rows_are_found_without_a_bound_on_a_window() -> None:
    args, options = row_attention_case([1, 3], [900, 70], dtype=torch.bfloat16, window=100)
    query, ((cache, which),), batch = args
    assert torch.equal(run(args, options), run((query, [RowSource(cache, which._replace(most=None))], batch), options))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"value_dim": 513, "width": 513}, "512"),
        ({"width": 400, "value_dim": 16}, "128"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_what_it_does_not_know_is_refused(change: dict[str, Any], told: str) -> None:
    args, options = moved(row_attention_case([1], [7], **change), DEVICE)
    assert told in row_attention.explain(*args, **options)["triton"]


def test_queries_of_another_dtype_than_the_rows_are_refused() -> None:
    (query, *others), options = moved(row_attention_case([1], [7]), DEVICE)
    assert "float32" in row_attention.explain(query.bfloat16(), *others, **options)["triton"]
