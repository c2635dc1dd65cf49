"""Experts in FP8 or MXFP4: how they lie in memory, what their inputs are rounded to, and launches of their products.

Weights have the layouts of `_prepared_weight`: e4m3 in "blocks", e2m1 in "planes". Those of all experts lie one after
the other, in slots as large as the layout needs, so that e2m1 is laid out anew where it is.

- FP8 weights, inputs in FP8 with a scale per 128 columns: products of FP8 operands, scaled block by block.
- FP8 weights otherwise: decoded to bfloat16 in registers, which is exact, and scaled block by block.
- MXFP4 weights: decoded to bfloat16 with their scales, which is exact.
- Inputs in FP8 whose scales are powers of two become bfloat16 beside all but the first, which is exact too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from rorqual.ops.linear import Weight
from rorqual.ops.triton import _moe_quantized_kernels as kernels
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton._prepared_weight import GROUP, TILE_ROWS, WIDTH, PreparedWeight, lay_out, refuse_weight
from rorqual.quantization import QTensor, QuantFormat

_ROUNDED_AT_ONCE = 512
"""Columns of a row that one program rounds."""


class ExpertTile(NamedTuple):
    """What one program computes: up to block_m rows, and features that take up to block_n lines of the weight (two for
    each where gate and up are multiplied); with how many warps, and the stages of its loop."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    weight_first: bool = True
    """Whether the weight is the tensor cores' first operand, which has 64 rows; the second may have 8."""
    specialized: bool = False
    """Whether some warps copy and others multiply (`_hopper_experts`), where that can be; elsewhere an unspecialised
    tile takes its place. Has 128 rows and 256 lines; the warps are the kernel's."""


class ExpertTiles(NamedTuple):
    """Of both products."""

    gate_up: ExpertTile
    down: ExpertTile


def _both(block_m: int, block_n: int, warps: int, stages: int) -> ExpertTiles:
    tile = ExpertTile(block_m, block_n, warps, stages)
    return ExpertTiles(tile, tile)


# Tiles of 8 rows, or of fewer than four warps, multiply with mma instead of wgmma, for which decoding takes fewer
# instructions, and have the same bits in bfloat16. A warp of its own waits for no other, but a lone token's few
# programs need several to keep a multiprocessor busy.
_MXFP4: dict[float, ExpertTiles] = {
    1 / 16: _both(8, 64, 4, 4),
    1: _both(8, 64, 1, 4),
    8: _both(8, 64, 2, 4),
    16: _both(16, 64, 2, 4),
    32: _both(64, 64, 4, 4),
}
QUANTIZED_TILES: dict[str, dict[float, ExpertTiles]] = {
    # All with four warps or more, 64 lines and 16 rows (wgmma): mma is slow in FP8.
    "fp8": {8: _both(16, 64, 4, 5), 16: _both(32, 128, 4, 4), 32: _both(64, 128, 4, 4)},
    "fp8_weight": {
        1: _both(8, 64, 2, 6),
        8: _both(16, 64, 2, 5),
        16: _both(32, 64, 2, 4),
        32: _both(64, 64, 4, 4),
        128: _both(128, 128, 8, 3),
    },
    "mxfp4": {**_MXFP4, 128: _both(128, 128, 8, 3)},
    "mxfp4_scaled": _MXFP4,
}
"""By how weights are multiplied, and by the most rows per expert, on average; the last are for all above. Where sums
are scaled block by block, a tile has two of them in registers, for which 128 x 128 may be too much."""


class QuantizedStack(NamedTuple):
    """Experts of one layout at equal distances in memory."""

    first: QTensor
    """The first expert's, as `lay_out` makes it."""
    num_experts: int
    values_step: int
    scales_step: int
    """From expert to expert, in elements."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """[num_experts, out_features, in_features]."""
        rows, columns = self.first.shape
        return self.num_experts, rows, columns


class Inputs(NamedTuple):
    """What a product multiplies by."""

    values: torch.Tensor
    """[rows, columns] bfloat16 or float8_e4m3fn."""
    scales: torch.Tensor | None = None
    """float32 [rows, groups], if there are any beside the values."""
    group: int = 0
    """Columns that share one."""


# --- memory


def _slot_bytes(format: QuantFormat, rows: int, columns: int) -> tuple[int, int]:
    """Bytes of an expert's values and scales, before and after they are laid out."""
    groups = -(-columns // WIDTH)
    if format.element == "e2m1":
        return -(-rows // TILE_ROWS) * TILE_ROWS * groups * WIDTH // 2, -(-rows // 4) * 4 * groups * 4
    height, width = format.scale_shape((rows, columns))
    return rows * columns, height * width * (4 if format.scale == "float32" else 1)


def allocate_quantized(
    num_experts: int, rows: int, columns: int, format: QuantFormat, device: torch.device
) -> tuple[QTensor, ...]:
    """Uninitialised weights, as checkpoints have them, each at the beginning of its slot."""
    like = QTensor.empty((rows, columns), format, torch.device("meta"))
    slots = (
        torch.empty((num_experts, size), dtype=torch.uint8, device=device)
        for size in _slot_bytes(format, rows, columns)
    )
    values, scales = (
        [slot[: meta.nbytes].view(meta.dtype).view(meta.shape) for slot in part]
        for part, meta in zip(slots, (like.values, like.scales), strict=True)
    )
    return tuple(QTensor(*parts, format) for parts in zip(values, scales, strict=True))


def _slots(tensors: list[torch.Tensor], size: int) -> torch.Tensor | None:
    """The memory of tensors that lie at the beginning of slots, uint8 [num_experts, size]; None if they do not."""
    storage = tensors[0].untyped_storage()
    if storage.nbytes() != len(tensors) * size:
        return None
    start = storage.data_ptr()
    if any(tensor.data_ptr() != start + number * size for number, tensor in enumerate(tensors)):
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage, 0, (len(tensors), size), (size, 1))


def refuse_preparation(weights: tuple[Weight, ...]) -> str | None:
    """Why experts cannot be laid out together, or None."""
    first = weights[0]
    if not isinstance(first, QTensor):
        return "only quantised weights are laid out anew"
    for weight in weights:
        if not isinstance(weight, QTensor) or weight.shape != first.shape or weight.format != first.format:
            return "needs experts of one shape and format"
        if reason := refuse_weight(weight):
            return reason
    if first.format.element == "e4m3" and first.format.scale == "ue8m0" and first.format.block[1] == GROUP:
        return f"has no products of experts in {first.format.name}"
    sizes = _slot_bytes(first.format, *first.shape)
    for tensors, size in zip(_parts(weights), sizes, strict=True):
        if _slots(tensors, size) is None:
            return "needs experts that lie one after the other, as allocate_experts makes them"
    return None


def _parts(weights: tuple[Weight, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    kept = [weight for weight in weights if isinstance(weight, QTensor)]
    return [weight.values for weight in kept], [weight.scales for weight in kept]


def prepare_quantized(weights: tuple[Weight, ...]) -> tuple[QTensor, ...]:
    """Lay experts out, one after the other: values and e2m1's scales where they are, float32 scales in one piece."""
    first = weights[0]
    assert isinstance(first, QTensor)
    values, scales = (
        _slots(tensors, size)
        for tensors, size in zip(_parts(weights), _slot_bytes(first.format, *first.shape), strict=True)
    )
    assert values is not None
    made: list[QTensor] = []
    for number, weight in enumerate(weights):
        assert isinstance(weight, QTensor)
        laid = lay_out(weight)
        size = laid.scales.untyped_storage().nbytes()
        if scales is None or scales.shape[1] != size:
            scales = torch.empty((len(weights), size), dtype=torch.uint8, device=laid.device)
        moved = laid.values
        if moved.data_ptr() != values[number].data_ptr():
            moved = values[number].view(moved.dtype).view(moved.shape).copy_(moved)
        dense = scales[number].view(laid.scales.dtype)
        kept = dense.as_strided(laid.scales.shape, laid.scales.stride(), dense.storage_offset()).copy_(laid.scales)
        made.append(replace(laid, values=moved, scales=kept))
    return tuple(made)


def stack_quantized(weights: tuple[Weight, ...]) -> QuantizedStack | str:
    """Experts as `prepare_quantized` laid them out; or what is wrong."""
    first = weights[0]
    assert isinstance(first, QTensor)
    kind, format = first.kind if isinstance(first, PreparedWeight) else "blocks", first.format
    blocks = (format.element, format.scale) == ("e4m3", "float32") and format.block[1] in (32, 64, 128)
    if kind == "words" or (kind == "blocks" and not blocks):
        return f"experts in {format.name} are not laid out for it"
    steps = []
    for tensors in _parts(weights):
        apart = tensors[1].data_ptr() - tensors[0].data_ptr() if len(tensors) > 1 else 0
        memory = tensors[0].untyped_storage().data_ptr()
        for number, tensor in enumerate(tensors):
            if (
                len(tensors) != len(weights)
                or tensor.shape != tensors[0].shape
                or tensor.stride() != tensors[0].stride()
                or tensor.dtype != tensors[0].dtype
                or tensor.data_ptr() != tensors[0].data_ptr() + number * apart
                or tensor.untyped_storage().data_ptr() != memory
                or apart % tensor.element_size()
            ):
                return "needs experts of one shape that lie one after the other, as prepare_experts lays them out"
        steps.append(apart // tensors[0].element_size())
    return QuantizedStack(first, len(weights), *steps)


# --- inputs


def refuse_activation(stack: QuantizedStack, activation: QuantFormat | None) -> str | None:
    """Why a product's input cannot be rounded to a format beside these weights, or None."""
    if activation is None:
        return None
    rows, columns = activation.block
    fits = rows == 1 and columns in (32, 64, 128) and (activation.scale == "ue8m0" or columns == 128)
    if activation.element == "e4m3" and activation.scale != "e4m3" and fits:
        return None
    wanted = "e4m3 in rows of 32, 64 or 128 columns with UE8M0 scales, or of 128 with float32 ones"
    return f"rounds inputs to {wanted} beside {stack.first.format.name}, got {activation.name}"


def round_inputs(x: torch.Tensor, stack: QuantizedStack, activation: QuantFormat | None) -> Inputs:
    """x [rows, columns] as a product with these experts takes it; one launch if it is rounded at all."""
    if activation is None:
        return Inputs(x)
    (rows, columns), group = x.shape, activation.block[1]
    if stack.first.format.element == "e4m3" and group == WIDTH:
        kind, dtype = "codes", torch.uint8
    else:
        kind, dtype = "products" if activation.scale == "ue8m0" else "elements", torch.bfloat16
    groups, together = -(-columns // group), _ROUNDED_AT_ONCE // group
    values = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = None if kind == "products" else torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    kernels.round_rows_kernel[(rows * -(-groups // together),)](
        x,
        values,
        values if scales is None else scales,
        columns,
        groups,
        x.stride(0),
        GROUP_SIZE=group,
        LARGEST=activation.largest,
        FLOOR=activation.amax_floor,
        UE8M0=activation.scale == "ue8m0",
        KIND=kind,
        GROUPS=together,
        num_warps=1,
        launch_pdl=DEPENDENT_LAUNCH,
    )
    if kind == "codes":
        values = values.view(torch.float8_e4m3fn)
    return Inputs(values, scales, 0 if scales is None else group)


# --- products


def family_of(stack: QuantizedStack, activation: QuantFormat | None) -> str:
    """How these experts are multiplied: the key of QUANTIZED_TILES."""
    if stack.first.format.element == "e2m1":
        scaled = activation is not None and activation.scale == "float32"
        return "mxfp4_scaled" if scaled else "mxfp4"
    return "fp8" if activation is not None and activation.block[1] == WIDTH else "fp8_weight"


def multiply_quantized(
    x: Inputs,
    stack: QuantizedStack,
    out: torch.Tensor,
    order: torch.Tensor | None,
    table: torch.Tensor,
    top_k: int,
    tile: ExpertTile,
    together: int,
    *,
    gated: bool,
    limit: float | None = None,
) -> None:
    """One product, `together` features at a time; without an order, of one token, whose ids the table is."""
    (num_pairs, features), weight = out.shape, stack.first
    columns, planes = weight.shape[1], weight.format.element == "e2m1"
    max_tiles = num_pairs if order is None else table.shape[1]
    fp8 = x.values.dtype is torch.float8_e4m3fn
    block_rows, width = (1, GROUP) if planes else weight.format.block
    step = GROUP if planes else min(width, x.group or width)
    kernels.quantized_experts_kernel[(max_tiles * -(-features // together),)](
        x.values,
        x.values if x.scales is None else x.scales,
        weight.values if planes or fp8 else weight.values.view(torch.uint8),
        weight.scales,
        out,
        order,
        table,
        stack.num_experts,
        features,
        columns,
        x.values.stride(0),
        1 if x.scales is None else x.scales.stride(0),
        stack.values_step,
        weight.values.stride(0),
        stack.scales_step,
        weight.scales.stride(0),
        weight.scales.stride(1),
        block_rows,
        top_k,
        max_tiles,
        ELEMENT=weight.format.element,
        X_GROUP=x.group,
        W_GROUP=width,
        STEP=step,
        FP8=fp8,
        LIMIT=limit,
        GATED=gated,
        ONE_TOKEN=order is None,
        EVEN_K=columns % (WIDTH if planes else step) == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        FEATURES=together,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=DEPENDENT_LAUNCH,
    )
