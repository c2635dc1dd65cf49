"""Reading cache records back into rows: the inverse of the fused write in `rorqual.ops.kv_transform`.

Source: DeepInfer 0.1.0's paged load.
"""

from __future__ import annotations

import torch

from rorqual.ops.kv_transform import DTYPES
from rorqual.ops.registry import op
from rorqual.quantization.kv_record import KVRecord
from rorqual.quantization.qtensor import QTensor


@op
def load_kv(
    cache: torch.Tensor,
    segments: torch.Tensor,
    total: int,
    *,
    record: KVRecord,
    out: torch.Tensor | None = None,
) -> torch.Tensor | QTensor:
    """Rows of numbers from scattered slots: the inverse of `transform_and_store_kv`.

    Args:
        cache: uint8 [num_blocks, block_size, 1, record.bytes].
        segments: int32 [n, 4] of (block, begin, end, row): slots [begin, end) of the block go to the rows from `row`
            on; block -1 writes zeros. `rorqual.ops.load_plan` makes and checks them; no two may write one row.
        total: rows of the result.
        record: what the cache holds.
        out: where to write instead of new memory, [total, dims] of bfloat16, float16 or float32, with any row stride;
            only for records of whole tokens.

    Returns: [total, dims], bfloat16 unless `out` says otherwise; value * scale in float32, rounded once. For records
    laid out over the block, which their reader takes as they are: a QTensor of the values and the scales. Rows that no
    segment names are not specified, or left alone in `out`.

    Raises: ValueError for shapes and dtypes that do not fit together. Segments beyond the cache, the block or the
    result raise ValueError on a CPU; a GPU, which cannot raise, leaves them out.
    """
    check_load(cache, segments, total, record, out)
    views = record.split(cache)
    result = allocate_loaded(record, total, cache.device) if out is None else out
    for block, begin, end, row in segments.tolist():
        inside = 0 <= begin <= end <= cache.shape[1] and -1 <= block < cache.shape[0]
        if not inside or not 0 <= row <= total - end + begin:
            raise ValueError(
                f"segment (block {block}, slots [{begin}, {end}), row {row}) reaches beyond the cache of "
                f"{cache.shape[0]} blocks of {cache.shape[1]} slots or the {total} rows of the result"
            )
        rows = slice(row, row + end - begin)
        if isinstance(result, QTensor):
            for target, view in zip((result.values, result.scales), views[:2], strict=True):
                assert view is not None
                target[rows] = 0 if block < 0 else view[block, begin:end]
        elif block < 0:
            result[rows] = 0
        elif record.format is None or views.scales is None:
            result[rows] = views.values[block, begin:end].to(result.dtype)
        else:
            found = QTensor(views.values[block, begin:end], views.scales[block, begin:end], record.format)
            result[rows] = found.dequantize(result.dtype)
    return result


def allocate_loaded(record: KVRecord, total: int, device: torch.device) -> torch.Tensor | QTensor:
    """What `load_kv` fills: bfloat16 [total, dims], or a QTensor for records laid out over the block."""
    if record.interleaved:
        return torch.empty(total, record.dims, dtype=torch.bfloat16, device=device)
    assert record.format is not None
    return QTensor(
        torch.empty(total, record.value_bytes // record.value_dtype.itemsize, dtype=record.value_dtype, device=device),
        torch.empty(total, record.num_scales, dtype=record.scale_dtype, device=device),
        record.format,
    )


def check_load(
    cache: torch.Tensor, segments: torch.Tensor, total: int, record: KVRecord, out: torch.Tensor | None
) -> None:
    """Raise ValueError for arguments of `load_kv` that do not fit together."""
    record.check(cache)
    if segments.dtype != torch.int32 or segments.dim() != 2 or segments.shape[1] != 4:
        raise ValueError(
            f"segments must be int32 [n, 4], got {segments.dtype} {list(segments.shape)}: see rorqual.ops.load_plan"
        )
    if out is None:
        return
    if not record.interleaved:
        raise ValueError(f"records of {record.name} are loaded as values and scales: leave out= away")
    if out.shape != (total, record.dims) or out.dtype not in DTYPES or out.stride(-1) != 1:
        raise ValueError(
            f"out must be bfloat16, float16 or float32 of shape [{total}, {record.dims}] with rows in one piece, "
            f"got {out.dtype} {list(out.shape)} of strides {out.stride()}"
        )
