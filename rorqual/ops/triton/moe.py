"""Mixtures on NVIDIA GPUs: routing in one launch, experts in three to seven, and no number for the host.

Pairs of (token, choice) are ordered by expert on the device, and products are launched for as many tiles as there
could be: programs without one end at once. So a decode step can be recorded as a CUDA graph. Up to a few dozen rows per
expert the products stream weights; tiles for more are for the tensor cores' full rate. All tiles of a dtype multiply
with the same instructions and add K up in the same order, so that a token gets the same whatever its company.

Experts lie one after the other, as `allocate_experts` makes them; quantised ones as `prepare_experts` lays them out
there. `_moe_quantized` says how those are multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rorqual.ops.linear import Weight
from rorqual.ops.moe import (
    ExpertWeights,
    Routing,
    Scoring,
    TokenTable,
    allocate_experts,
    fused_experts,
    prepare_experts,
    route_scores,
    route_softmax,
)
from rorqual.ops.triton import _hopper_experts, _moe_kernels, _routing_kernels
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton._moe_quantized import (
    QUANTIZED_TILES,
    ExpertTile,
    ExpertTiles,
    QuantizedStack,
    allocate_quantized,
    family_of,
    multiply_quantized,
    prepare_quantized,
    refuse_activation,
    refuse_preparation,
    round_inputs,
    stack_quantized,
)
from rorqual.ops.triton.launch import DEVICE, available, refuses
from rorqual.quantization import QTensor, QuantFormat

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 1024
_CHUNKS = (128, 512, 2048, 4096)
"""Pairs that a program orders; few sizes, as each is compiled. Up to the last, one launch does."""
_FEW_CHUNKS = 16
_EXPERTS_TOGETHER = 4
"""Experts, up to 4, whose pairs one program places where there are several chunks: it reads its chunk's ids once."""


SPECIALIZED = ExpertTiles(ExpertTile(128, 256, 12, 4, False, True), ExpertTile(128, 256, 12, 4, False, True))
"""For prompts, bfloat16, on Hopper."""
TILES: dict[float, ExpertTiles] = {
    # All have four warps or more and at least 64 rows of their first operand (wgmma): mma may round differently.
    4: ExpertTiles(ExpertTile(16, 64, 4, 6), ExpertTile(16, 64, 4, 6)),
    16: ExpertTiles(ExpertTile(32, 64, 4, 5), ExpertTile(32, 64, 4, 5)),
    32: ExpertTiles(ExpertTile(64, 128, 4, 4), ExpertTile(64, 128, 4, 4)),
    128: ExpertTiles(ExpertTile(128, 128, 8, 3), ExpertTile(128, 128, 8, 3)),
    256: SPECIALIZED,
}
"""The most rows per expert, on average, that tiles are taken for; the last are for all above. An expert may well have
twice the average, and each tile reads the weight."""
_UNSPECIALIZED = ExpertTile(128, 128, 8, 3)
_FLOAT32 = ExpertTiles(ExpertTile(16, 64, 4, 2), ExpertTile(16, 64, 4, 2))
"""For tests mostly: exact products, without tensor cores."""
_PROGRAMS = 240
"""Programs that a product should have: about two for each multiprocessor."""


Stack = torch.Tensor | QuantizedStack
"""All experts' weights for one product: [num_experts, out_features, in_features]."""


class _Plan(NamedTuple):
    """The experts as the kernels read them, or why they cannot."""

    refusal: str | None
    gate_up: Stack | None = None
    """[num_experts, 2 * intermediate_size, hidden_size]."""
    down: Stack | None = None
    """[num_experts, hidden_size, intermediate_size]."""
    limit: float | None = None


# --- routing: which experts a token uses and how much, in one launch


def power_of_two(number: int) -> int:
    """The lowest that is not less."""
    return 1 << (number - 1).bit_length()


def _refuse_routing(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> str | None:
    if reason := refuses(router_logits):
        return reason
    num_experts = router_logits.shape[1]
    if router_logits.dtype not in _DTYPES or num_experts > MOST_EXPERTS:
        wanted = f"bfloat16, float16 or float32 for up to {MOST_EXPERTS} experts"
        return f"needs {wanted}, got {router_logits.dtype} for {num_experts}"
    return None if 0 < top_k <= num_experts else f"chooses 1 to {num_experts} experts, got {top_k}"


@route_softmax.impl("triton", refuse=_refuse_routing)
def route_softmax_triton(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> Routing:
    """One launch."""
    num_tokens, num_experts = router_logits.shape
    made = Routing(
        torch.empty((num_tokens, top_k), dtype=torch.int64, device=router_logits.device),
        torch.empty((num_tokens, top_k), dtype=router_logits.dtype, device=router_logits.device),
    )
    if num_tokens:
        _routing_kernels.route_softmax_kernel[(num_tokens,)](
            router_logits,
            *made,
            num_experts,
            *router_logits.stride(),
            TOP_K=top_k,
            PADDED_K=power_of_two(top_k),
            PADDED_EXPERTS=power_of_two(num_experts),
            RENORMALIZE=renormalize,
            num_warps=1 if num_experts <= 256 else 4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return made


def _refuse_scores(
    router_logits: torch.Tensor,
    *,
    scoring: Scoring,
    top_k: int,
    renormalize: bool,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    table: TokenTable | None = None,
) -> str | None:
    if reason := refuses(router_logits, bias, *(table or ())):
        return reason
    if router_logits.dim() != 2 or router_logits.dtype is not torch.float32:
        return f"needs float32 [num_tokens, num_experts], got {router_logits.dtype} {list(router_logits.shape)}"
    num_experts = router_logits.shape[1]
    if num_experts > MOST_EXPERTS or num_experts % num_groups:
        return f"takes up to {MOST_EXPERTS} experts in equal groups, got {num_experts} in {num_groups}"
    if table is not None:
        fits = table.expert_ids.shape[1] == top_k and table.expert_ids.stride(1) == 1 and table.token_ids.dim() == 1
        return None if fits else f"needs a table of rows of {top_k} experts, got {list(table.expert_ids.shape)}"
    if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous()):
        return f"needs a float32 bias without gaps, got {bias.dtype}"
    if top_groups < num_groups and num_experts < 2 * num_groups:
        return "needs groups of two experts or more"
    return None if 0 < top_k <= num_experts else f"chooses 1 to {num_experts} experts, got {top_k}"


@route_scores.impl("triton", refuse=_refuse_scores)
def route_scores_triton(
    router_logits: torch.Tensor,
    *,
    scoring: Scoring,
    top_k: int,
    renormalize: bool,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    table: TokenTable | None = None,
) -> Routing:
    """One launch."""
    num_tokens, num_experts = router_logits.shape
    made = Routing(
        torch.empty((num_tokens, top_k), dtype=torch.int64, device=router_logits.device),
        torch.empty((num_tokens, top_k), dtype=torch.float32, device=router_logits.device),
    )
    groups = num_groups if top_groups < num_groups else 1
    if num_tokens:
        _routing_kernels.route_scores_kernel[(num_tokens,)](
            router_logits,
            bias,
            None if table is None else table.expert_ids,
            None if table is None else table.token_ids.contiguous(),
            *made,
            num_experts,
            num_experts // groups,
            groups,
            *router_logits.stride(),
            0 if table is None else table.expert_ids.stride(0),
            scale,
            SIGMOID=scoring == "sigmoid",
            BIASED=bias is not None,
            TABLE=table is not None,
            RENORMALIZE=renormalize,
            TOP_K=top_k,
            PADDED_K=power_of_two(top_k),
            TOP_GROUPS=top_groups if groups > 1 else 0,
            PADDED_GROUPS=power_of_two(groups),
            PADDED_SIZE=power_of_two(num_experts // groups),
            num_warps=1 if num_experts <= 256 else 4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return made


# --- weights


def _refuse_allocation(
    num_experts: int,
    out_features: int,
    in_features: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    format: QuantFormat | None = None,
) -> str | None:
    if device.type != DEVICE or not available():
        return f"is for tensors on {DEVICE}, got {device.type}"
    return None


@allocate_experts.impl("triton", refuse=_refuse_allocation)
def allocate_experts_triton(
    num_experts: int,
    out_features: int,
    in_features: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    format: QuantFormat | None = None,
) -> tuple[Weight, ...]:
    """One after the other, in one allocation, or one of values and one of scales."""
    if format is not None:
        return allocate_quantized(num_experts, out_features, in_features, format, device)
    return torch.empty((num_experts, out_features, in_features), dtype=dtype, device=device).unbind()


def _refuse_preparation(weights: tuple[Weight, ...]) -> str | None:
    for part in weights:
        if isinstance(part, QTensor) and (reason := refuses(part.values, part.scales)):
            return reason
    return refuse_preparation(weights)


@prepare_experts.impl("triton", refuse=_refuse_preparation)
def prepare_experts_triton(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Where they are; see `_moe_quantized`."""
    return prepare_quantized(weights)


def _stacked(weights: tuple[Weight, ...]) -> Stack | str:
    """Weights that lie one after the other as one; or what is wrong."""
    first = weights[0]
    if isinstance(first, QTensor):
        return stack_quantized(weights)
    if not isinstance(first, torch.Tensor) or first.dim() != 2 or first.is_mkldnn:
        return f"multiplies by plain weights, FP8 and MXFP4, got {type(first).__name__}"
    size = first.numel() * first.element_size()
    start, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    for number, weight in enumerate(weights):
        if not (
            isinstance(weight, torch.Tensor)
            and weight.shape == first.shape
            and weight.dtype == first.dtype
            and weight.is_contiguous()
            and weight.untyped_storage().data_ptr() == memory
            and weight.data_ptr() == start + number * size
        ):
            return "needs experts of one shape that lie one after the other, as allocate_experts makes them"
    return first.as_strided((len(weights), *first.shape), (first.numel(), first.shape[1], 1))


def _plan_of(experts: ExpertWeights) -> _Plan:
    plan: _Plan | None = experts.prepared.get("triton")
    if plan is None:
        plan = experts.prepared["triton"] = _make_plan(experts)
    return plan


def _make_plan(experts: ExpertWeights) -> _Plan:
    if len(experts.gate_up) > MOST_EXPERTS:
        return _Plan(f"takes up to {MOST_EXPERTS} experts, got {len(experts.gate_up)}")
    gate_up, down = _stacked(experts.gate_up), _stacked(experts.down)
    for found in (gate_up, down):
        if isinstance(found, str):
            return _Plan(found)
        if isinstance(found, QuantizedStack) and (reason := refuse_activation(found, experts.activation)):
            return _Plan(reason)
    assert not isinstance(gate_up, str)
    assert not isinstance(down, str)
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        if experts.activation is not None:
            return _Plan(f"does not quantise its inputs to {experts.activation.name} beside plain weights")
        if gate_up.dtype not in _DTYPES or gate_up.dtype != down.dtype:
            return _Plan(f"needs weights in bfloat16, float16 or float32, got {gate_up.dtype} and {down.dtype}")
    elif isinstance(gate_up, torch.Tensor) or isinstance(down, torch.Tensor):
        return _Plan("needs both products' weights quantised, or both plain")
    elif family_of(gate_up, experts.activation) != family_of(down, experts.activation):
        return _Plan(f"needs weights of one kind, got {gate_up.first.format.name} and {down.first.format.name}")
    (_, double, hidden), (_, wide, inner) = gate_up.shape, down.shape
    if double != 2 * inner or wide != hidden:
        return _Plan(f"needs gate_up [2 n, m] and down [m, n], got {[double, hidden]} and {[wide, inner]}")
    limit = experts.swiglu_limit
    if limit is not None and isinstance(gate_up, torch.Tensor):  # torch's clamp takes it in the values' dtype
        limit = torch.tensor(limit, dtype=gate_up.dtype).item()
    elif limit is not None:
        limit = torch.tensor(limit, dtype=torch.bfloat16).item()
    return _Plan(None, gate_up, down, limit)


# --- experts


def _refuse(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> str | None:
    if reason := refuses(x, *routing):
        return reason
    plan = _plan_of(experts)
    if plan.refusal is not None:
        return plan.refusal
    assert plan.gate_up is not None
    if isinstance(plan.gate_up, QuantizedStack):
        place, dtype = plan.gate_up.first.values, torch.bfloat16
    else:
        place, dtype = plan.gate_up, plan.gate_up.dtype
    if reason := refuses(place):
        return reason
    if x.dtype != dtype:
        return f"needs x in {dtype} beside these weights, got {x.dtype}"
    if x.shape != (routing.expert_ids.shape[0], hidden := plan.gate_up.shape[2]):
        return f"needs rows of {hidden} values, one for each token that is routed, got {list(x.shape)}"
    if routing.expert_ids.dtype is not torch.int64 or routing.weights.dtype not in _DTYPES:
        return f"needs int64 ids and floating weights, got {routing.expert_ids.dtype} and {routing.weights.dtype}"
    return None


@fused_experts.impl("triton", refuse=_refuse)
def fused_experts_triton(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> torch.Tensor:
    """See the reference. Where all experts are here, what a token gets is undefined if one of its ids is no expert's;
    others do not notice."""
    plan = _plan_of(experts)
    assert plan.gate_up is not None
    assert plan.down is not None
    return multiply_experts(
        x,
        plan.gate_up,
        plan.down,
        routing,
        activation=experts.activation,
        limit=plan.limit,
        num_everywhere=experts.num_everywhere,
    )


def tiles_for(stack: Stack, activation: QuantFormat | None, num_pairs: int, num_experts: int) -> ExpertTiles:
    """The entry of TILES, or of QUANTIZED_TILES, for so many rows."""
    if isinstance(stack, QuantizedStack):
        entries = QUANTIZED_TILES[family_of(stack, activation)]
    elif stack.dtype is torch.float32:
        return _FLOAT32
    else:
        entries = TILES
    return next((tiles for most, tiles in entries.items() if num_pairs <= most * num_experts), entries[max(entries)])


def multiply_experts(
    x: torch.Tensor,
    gate_up: Stack,
    down: Stack,
    routing: Routing,
    tiles: ExpertTiles | None = None,
    *,
    activation: QuantFormat | None = None,
    limit: float | None = None,
    num_everywhere: int | None = None,
) -> torch.Tensor:
    """`fused_experts` of experts [num_experts, 2 * intermediate, hidden] and [num_experts, hidden, intermediate]."""
    num_tokens, top_k = routing.expert_ids.shape
    (num_experts, hidden_size, inner_size), num_pairs = down.shape, num_tokens * top_k
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tiles = tiles or tiles_for(gate_up, activation, num_pairs, num_everywhere or num_experts)
    assert tiles.gate_up.block_m == tiles.down.block_m, "both products read one order"
    x = x if x.stride(1) == 1 else x.contiguous()
    expert_ids = routing.expert_ids.contiguous()
    weights = routing.weights if routing.weights.stride(1) == 1 else routing.weights.contiguous()
    order, table = (None, expert_ids) if num_tokens == 1 else _order(expert_ids, num_experts, tiles.gate_up.block_m)
    hidden, answers = (torch.empty((num_pairs, n), dtype=x.dtype, device=x.device) for n in (inner_size, hidden_size))
    for y, stack, made, tile in ((x, gate_up, hidden, tiles.gate_up), (hidden, down, answers, tiles.down)):
        gated = made is hidden
        if isinstance(stack, QuantizedStack):
            together = _features_of(tile, made, order, table, gated=gated)
            rounded = round_inputs(y, stack, activation)
            multiply_quantized(
                rounded, stack, made, order, table, top_k, tile, together, gated=gated, limit=limit if gated else None
            )
        else:
            _multiply(y, stack, made, order, table, top_k, tile, gated=gated, limit=limit if gated else None)
    block = min(512, power_of_two(hidden_size))
    _moe_kernels.combine_kernel[num_tokens, -(-hidden_size // block)](
        answers,
        weights,
        expert_ids,
        out,
        hidden_size,
        weights.stride(0),
        num_experts,
        TOP_K=top_k,
        BLOCK=block,
        SOME=num_everywhere is not None,
        num_warps=2,
        launch_pdl=DEPENDENT_LAUNCH,
    )
    return out


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """How many tiles pairs can need: as if as many experts as possible had one row more than whole tiles."""
    busy = min(num_pairs, num_experts)
    return busy + (num_pairs - busy) // block_m


def _order(expert_ids: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs by expert, int32 [num_pairs], and the tiles, int32 [3, max_tiles], of `place_kernel`."""
    num_pairs, device = expert_ids.numel(), expert_ids.device
    max_tiles = most_tiles(num_pairs, num_experts, block_m)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((3, max_tiles), dtype=torch.int32, device=device)
    bins = max(128, power_of_two(num_experts))
    chunk = next((size for size in _CHUNKS if num_pairs <= size), _CHUNKS[-1])
    chunks = -(-num_pairs // chunk)
    options = {"BINS": bins, "CHUNK": chunk, "num_warps": 4 if chunk <= 512 else 8, "launch_pdl": DEPENDENT_LAUNCH}
    counts = order
    if chunks > 1:
        counts = torch.empty((chunks, bins), dtype=torch.int32, device=device)
        _moe_kernels.count_kernel[(chunks,)](expert_ids, counts, num_pairs, num_experts, **options)
    together = _EXPERTS_TOGETHER if chunks > 1 else 1
    _moe_kernels.place_kernel[-(-num_experts // together), chunks](
        expert_ids,
        counts,
        order,
        tiles,
        num_pairs,
        num_experts,
        max_tiles,
        chunks,
        COUNTED=chunks > 1,
        PADDED_CHUNKS=max(_FEW_CHUNKS, power_of_two(chunks)),
        BLOCK_M=block_m,
        TOGETHER=together,
        **options,
    )
    return order, tiles


def _multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    tile: ExpertTile,
    *,
    gated: bool,
    limit: float | None = None,
) -> None:
    """One product of `experts_kernel`; without an order, of one token, whose ids the table is."""
    if tile.specialized:
        if limit is None and order is not None and _hopper_experts.takes_product(x, w):
            _hopper_experts.multiply(x, w, out, order, table, top_k, tile.stages, gated=gated)
            return
        tile = _UNSPECIALIZED
    (num_pairs, features), columns = out.shape, w.shape[2]
    max_tiles = num_pairs if order is None else table.shape[1]
    together = _features_of(tile, out, order, table, gated=gated)
    wide = x.dtype is torch.float32
    step = 32 if wide else 64
    _moe_kernels.experts_kernel[(max_tiles * -(-features // together),)](
        x,
        w,
        out,
        order,
        table,
        w.shape[0],
        features,
        columns,
        x.stride(0),
        top_k,
        max_tiles,
        LIMIT=limit,
        GATED=gated,
        ONE_TOKEN=order is None,
        WEIGHT_FIRST=tile.weight_first,
        PRECISION="ieee" if wide else None,
        EVEN_K=columns % step == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        FEATURES=together,
        STEP=step,
        STAGES=tile.stages,
        launch_pdl=DEPENDENT_LAUNCH,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _features_of(
    tile: ExpertTile, out: torch.Tensor, order: torch.Tensor | None, table: torch.Tensor, *, gated: bool
) -> int:
    """Features that each program of a product computes."""
    max_tiles = out.shape[0] if order is None else table.shape[1]
    return _features_together(tile.block_n // 2 if gated else tile.block_n, out.shape[1], max_tiles)


def _features_together(most: int, features: int, tiles: int) -> int:
    """Features that a program computes: fewer than it could where there would be too few programs otherwise."""
    for together in (most, most * 3 // 4, most // 2):
        if tiles * -(-features // together) >= _PROGRAMS:
            return together
    return most // 2
