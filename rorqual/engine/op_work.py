"""What a call of an op must move and compute at least, from its arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rorqual.batch import Batch
from rorqual.engine.roofline import ExpertsCost, Work, visible_keys
from rorqual.engine.row_work import ROW_COUNTS
from rorqual.ops.registry import Op
from rorqual.quantization import QTensor

Arguments = Mapping[str, Any]
"""The arguments of a call, by the names that the op's reference has for them."""


def op_work(op: Op[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Work | None:
    """The least work of a call that gave `result`; None for an op that is not counted here."""
    bound = inspect.signature(op.reference).bind(*args, **kwargs)
    bound.apply_defaults()
    count = _COUNTS.get(op.name)
    return None if count is None else count(bound.arguments, result)


def _elementwise(given: Arguments, result: Any) -> Work:
    """Every tensor read or written once."""
    return Work(sum(t.nbytes for t in (*_tensors(tuple(given.values())), *_tensors(result))), 0)


def _linear(given: Arguments, result: torch.Tensor) -> Work:
    x, rows = given["x"], result.numel() // result.shape[-1]
    held = [given["bias"], given["out_acc"]]
    num_bytes = x.nbytes + given["weight"].nbytes + result.nbytes + sum(t.nbytes for t in held if t is not None)
    return Work(num_bytes, 2 * rows * x.shape[-1] * result.shape[-1])


def _gated_linear(given: Arguments, result: torch.Tensor) -> Work:
    """A product twice as wide as the result."""
    x, rows = given["x"], result.numel() // result.shape[-1]
    bias = 0 if given["bias"] is None else given["bias"].nbytes
    num_bytes = x.nbytes + given["weight"].nbytes + bias + result.nbytes
    return Work(num_bytes, 2 * rows * x.shape[-1] * 2 * result.shape[-1])


def _embedding(given: Arguments, result: torch.Tensor) -> Work:
    table = given["weight"]
    width = table.nbytes / max(1, _num_values(table))
    return Work(result.numel() * width + result.nbytes + given["ids"].nbytes, 0)


def _rope(given: Arguments, _result: Any) -> Work:
    heads = [t for t in (given["query"], given["key"]) if t is not None]
    angles = len(given["positions"]) * given["cos_sin"].shape[1] * given["cos_sin"].element_size()
    return Work(2 * sum(t.nbytes for t in heads) + angles + given["positions"].nbytes, 0)


def _store(given: Arguments, _result: Any) -> Work:
    key, cache = given["key"], given["key_cache"]
    read = key.nbytes + given["value"].nbytes + given["slot_mapping"].nbytes
    return Work(read + 2 * key.numel() * cache.element_size(), 0)


def _rotate_and_store(given: Arguments, result: torch.Tensor) -> Work:
    qkv, cache, angles = given["qkv"], given["cache"].key, given["rotation"].cos_sin
    stored = 2 * qkv.shape[0] * cache.shape[2] * cache.shape[3] * cache.element_size()
    looked_up = qkv.shape[0] * angles.shape[1] * angles.element_size()
    places = 2 * given["batch"].positions.nbytes  # where each token stands, and where it goes
    return Work(qkv.nbytes + result.nbytes + stored + looked_up + places, 0)


def _attention(given: Arguments, result: torch.Tensor) -> Work:
    query, cache, value_cache = given["query"], given["key_cache"], given["value_cache"]
    per_token = sum(t.shape[2] * t.shape[3] * t.element_size() for t in (cache, value_cache))
    work = _attended(given["batch"], given["sliding_window"], query.shape[1], query.shape[2], per_token)
    return Work(work.num_bytes + query.nbytes + result.nbytes, work.flops)


def _attended(batch: Batch, window: int | None, num_heads: int, head_dim: int, bytes_per_key: float) -> Work:
    """Reading the keys that any query of a sequence sees once, and multiplying each query with those that it sees."""
    read = seen = 0
    for length, context in zip(batch.query_lens, batch.context_lens_host, strict=True):
        read += context if window is None else min(context, window + length - 1)
        seen += visible_keys(context, window) - visible_keys(context - length, window)
    return Work(read * bytes_per_key, 4 * num_heads * head_dim * seen)


def _attention_block(given: Arguments, _result: Any) -> Work:
    block, cache, batch = given["block"], given["cache"], given["batch"]
    heads, kv_heads, dim = block.num_heads, block.num_kv_heads, block.head_dim
    rows, hidden_size = given["hidden"].shape
    per_token = 2 * kv_heads * dim * cache.key.element_size()
    attended = _attended(batch, block.sliding_window, heads, dim, per_token)
    values = hidden_size * dim * (2 * heads + 2 * kv_heads)
    num_bytes = block.qkv.weight.nbytes + block.out.weight.nbytes + _streams(given)
    return Work(num_bytes + attended.num_bytes, 2 * rows * values + attended.flops)


def _gated_mlp_block(given: Arguments, _result: Any) -> Work:
    weights = [product.weight for product in (given["block"].gate_up, given["block"].down)]
    flops = 2 * given["hidden"].shape[0] * sum(map(_num_values, weights))
    return Work(sum(w.nbytes for w in weights) + _streams(given), flops)


def _sparse_moe_block(given: Arguments, _result: Any) -> Work:
    block, rows = given["block"], given["hidden"].shape[0]
    count = len(block.experts.gate_up)
    chosen = ExpertsCost(1, count, block.top_k, 0, 0).expected_experts(rows)
    work = _experts(block.experts, chosen, rows * block.top_k)
    router = block.router.weight
    flops = work.flops + 2 * rows * _num_values(router)
    return Work(work.num_bytes + router.nbytes + _streams(given), flops)


def _fused_experts(given: Arguments, result: torch.Tensor) -> Work:
    ids, experts = given["routing"].expert_ids, given["experts"]
    if experts.num_everywhere is not None:
        ids = ids[(ids >= 0) & (ids < len(experts.gate_up))]
    work = _experts(experts, ids.unique().numel(), ids.numel())
    return Work(work.num_bytes + given["x"].nbytes + result.nbytes, work.flops)


def _experts(experts: Any, num_chosen: float, num_choices: int) -> Work:
    """`num_chosen` experts read once, and so many choices of one of them multiplied with it."""
    each = [experts.gate_up[0], experts.down[0]]
    return Work(num_chosen * sum(w.nbytes for w in each), 2 * num_choices * sum(map(_num_values, each)))


def _streams(given: Arguments) -> int:
    """A block's input and output, and the residual beside them."""
    return 4 * int(given["hidden"].nbytes)


def _num_values(weight: Any) -> int:
    """The numbers in a weight, however it is laid out."""
    return weight.numel() if isinstance(weight, torch.Tensor) else math.prod(weight.shape)


def _tensors(found: Any) -> Iterator[torch.Tensor | QTensor]:
    if isinstance(found, torch.Tensor | QTensor):
        yield found
    elif isinstance(found, tuple):
        for each in found:
            yield from _tensors(each)


_COUNTS: dict[str, Callable[[Arguments, Any], Work]] = ROW_COUNTS | {
    "attention_block": _attention_block,
    "embedding": _embedding,
    "fused_experts": _fused_experts,
    "gated_linear": _gated_linear,
    "gated_mlp_block": _gated_mlp_block,
    "linear": _linear,
    "paged_attention": _attention,
    "quantize": _elementwise,
    "rms_norm": _elementwise,
    "rotate_and_store": _rotate_and_store,
    "rotary_embedding": _rope,
    "route_softmax": _elementwise,
    "silu_and_mul": _elementwise,
    "sparse_moe_block": _sparse_moe_block,
    "sum_in_order": _elementwise,
    "store_kvcache": _store,
}
