"""The lightning indexer on NVIDIA GPUs: scores into a buffer, then the best top_k of each token.

The buffer is as wide as block tables are, which a CUDA graph knows; programs beyond a token's rows end at once, and so
does all scoring where all rows are taken. Tokens of answers have programs of their own; of a prompt, neighbours share
the keys that a program has read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.ops.row_attention import RowRange, seq_of_token
from rorqual.ops.row_cache import RowCache
from rorqual.ops.select_rows import select_rows
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton._select_kernels import DTYPES, scores_kernel, select_kernel
from rorqual.ops.triton.launch import refuses

_LARGEST_DIM, _MOST_HEADS = 256, 128
_BUFFER = 64 << 20
"""Scores that are kept at once: 256 MiB."""
_CHUNK = 16384
"""Candidates that one program chooses among."""
_CHOICE_WARPS = 16
"""Of those programs: a chunk lies in their registers."""
_PROGRAMS = 396
"""Programs that score, at least: three for each multiprocessor."""
_PROGRAMS_OF_A_TOKEN = 32
"""And of one sequence, since one may have many rows and the others few."""


class ScoreTile(NamedTuple):
    """What a program scores at a time: rows, of neighbouring tokens."""

    tile: int
    tokens: int
    warps: int
    stages: int
    registers: int | None = None
    """Of a thread at most, so that more programs fit in a multiprocessor: one adds up while another multiplies."""


class ScoreTiles(NamedTuple):
    """Of tokens of answers and of prompts."""

    answer: ScoreTile
    prompt: ScoreTile


# Four warps or more, with 64 rows or more for each four: one kind of instruction (wgmma), so that a token's scores do
# not depend on whether it came as an answer's or as a prompt's. Plain keys go to the tensor cores from shared memory,
# where they stay longer than those that are decoded in registers: these are read further ahead.
TILES: dict[str, ScoreTiles] = {
    "": ScoreTiles(ScoreTile(128, 1, 4, 3), ScoreTile(256, 16, 8, 2, 128)),
    "e4m3": ScoreTiles(ScoreTile(128, 1, 4, 5), ScoreTile(256, 16, 8, 2, 128)),
    "e2m1": ScoreTiles(ScoreTile(128, 1, 4, 5), ScoreTile(128, 16, 4, 2, 168)),
}
"""By what keys are."""
_FLOAT32 = ScoreTiles(ScoreTile(64, 1, 4, 1), ScoreTile(64, 16, 4, 1))
"""For tests mostly: exact products, without tensor cores."""


def _refuse(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: RowCache,
    rows: RowRange,
    batch: Batch,
    *,
    top_k: int,
) -> str | None:
    if refusal := refuses(query, weights, keys.data, rows.block_tables, rows.stop):
        return refusal
    if rows.first is not None:
        return "needs rows that begin at row 0"
    if not 1 <= top_k <= _CHUNK // 2:
        return f"needs a top_k of 1 to {_CHUNK // 2}, got {top_k}"
    if query.shape[2] > _LARGEST_DIM or query.shape[1] > _MOST_HEADS:
        return f"needs up to {_MOST_HEADS} heads of up to {_LARGEST_DIM} channels, got {list(query.shape[1:])}"
    if query.dtype not in DTYPES or (keys.record is None and keys.data.dtype not in DTYPES):
        return f"does not know queries of {query.dtype} beside keys of {keys.data.dtype}"
    if weights.dtype != torch.float32 or rows.stop.dtype != torch.int32 or rows.block_tables.dtype != torch.int32:
        return "needs weights of float32, and stops and block tables of int32"
    if any(t.stride(-1) != 1 for t in (query, weights, keys.data, rows.block_tables, rows.stop)):
        return "needs channels, weights, block tables and stops without gaps"
    record = keys.record
    if record is not None and record.format is not None:
        kind = (record.format.element, record.format.scale)
        if record.plain_dims or not (
            (kind == ("e4m3", "float32") and record.num_scales == 1)
            or (kind == ("e2m1", "ue8m0") and record.format.block == (1, 32) and record.dims % 128 == 0)
        ):
            return f"reads records of e4m3 with one float32 scale, or of MXFP4 by 128 values, got {record.name}"
    return None


@select_rows.impl("triton", refuse=_refuse)
def select_rows_triton(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: RowCache,
    rows: RowRange,
    batch: Batch,
    *,
    top_k: int,
) -> torch.Tensor:
    """See the reference."""
    num_tokens, device = len(query), query.device
    out = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    if num_tokens == 0:
        return out
    most = rows.block_tables.shape[1] * keys.rows_per_block
    width = max(16, 16 * -(-most // 16))  # so that rows of scores are aligned
    together = min(num_tokens, max(1, _BUFFER // width))
    scores = torch.empty((together, width), dtype=torch.float32, device=device)
    for first in range(0, num_tokens, together):
        part = scores[: min(together, num_tokens - first)]
        if most > top_k:
            _score(query, weights, keys, rows, batch, part, first, most, top_k)
        _choose(part, rows, batch, out, first, most, top_k, keys.rows_per_block)
    return out


def _score(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: RowCache,
    rows: RowRange,
    batch: Batch,
    scores: torch.Tensor,
    first: int,
    most: int,
    top_k: int,
) -> None:
    """Scores [n, width] of the tokens from `first` on."""
    num_heads, dim = query.shape[1:]
    end, singles = first + len(scores), batch.num_single_token_seqs
    values, scales, element, scale_steps = _views(keys)
    same = values.dtype == query.dtype or (element != "" and query.dtype == torch.bfloat16)
    compute = query.dtype if same else torch.float32
    answer, prompt = _FLOAT32 if compute == torch.float32 else TILES[element]
    steps = (*query.stride()[:2], weights.stride(0), *values.stride()[:2], *scale_steps, rows.block_tables.stride(0))

    def launch(tile: ScoreTile, first_seq: int, groups: int, seqs: int) -> None:
        programs = max(_PROGRAMS_OF_A_TOKEN, -(-_PROGRAMS // (groups * seqs)))
        scores_kernel[min(-(-most // tile.tile), programs), groups, seqs](
            query,
            weights,
            values,
            scales,
            rows.block_tables,
            rows.stop,
            batch.cu_seqlens_q,
            scores,
            first_seq,
            first,
            end,
            top_k,
            scores.shape[1],
            *steps,
            ELEMENT=element,
            HEADS=num_heads,
            PADDED_HEADS=max(16, 1 << (num_heads - 1).bit_length()),
            D=dim,
            PADDED_D=max(64 if element else 16, 1 << (dim - 1).bit_length()),
            ROWS_PER_BLOCK=keys.rows_per_block,
            TOKENS=tile.tokens,
            TILE=tile.tile,
            COMPUTE=DTYPES[compute],
            STAGES=tile.stages,
            num_warps=tile.warps,
            maxnreg=tile.registers,
            launch_pdl=DEPENDENT_LAUNCH,
        )

    if first < singles:
        launch(answer, first, 1, min(end, singles) - first)
    if end > singles and len(batch.query_lens) > singles:
        longest = min(max(batch.query_lens[singles:]), len(scores))
        launch(prompt, singles, -(-longest // prompt.tokens), len(batch.query_lens) - singles)


def _views(keys: RowCache) -> tuple[torch.Tensor, torch.Tensor | None, str, tuple[int, int]]:
    """Values [num_blocks, rows, ...], scales, what the values are ("" is plain numbers), and the steps of scales."""
    record = keys.record
    if record is None:
        return keys.data, None, "", (0, 0)
    values, scales, _ = record.split(keys.data)
    if record.format is None or scales is None:
        return values, None, "", (0, 0)
    if record.format.element == "e2m1":
        words = scales.view(torch.int32)
        return values.view(torch.uint8), words, "e2m1", (words.stride(0), words.stride(1))
    return values.view(torch.uint8), scales, "e4m3", (scales.stride(0), scales.stride(1))


def _choose(
    scores: torch.Tensor,
    rows: RowRange,
    batch: Batch,
    out: torch.Tensor,
    first: int,
    most: int,
    top_k: int,
    rows_per_block: int,
) -> None:
    """The best of scores [n, width], level by level, to out[first : first + n]."""
    owners = None if batch.num_single_token_seqs == len(out) else seq_of_token(batch)
    left, level = most, 0
    given: tuple[torch.Tensor, torch.Tensor | None] = scores, None
    while True:
        chunks = max(1, -(-left // _CHUNK))
        kept = (scores, out)  # where one chunk is all, nothing is kept
        if chunks > 1:
            room = (len(scores), 16 * -(-chunks * top_k // 16))
            kept = (scores.new_empty(room), out.new_empty(room))
        select_kernel[chunks, len(scores)](
            *given,
            *kept,
            out,
            rows.block_tables,
            owners,
            rows.stop,
            first,
            top_k,
            most,
            given[0].shape[1],
            kept[0].shape[1],
            rows.block_tables.stride(0),
            ROWS_PER_BLOCK=rows_per_block,
            LEVEL=level,
            CHUNK=_CHUNK,
            num_warps=_CHOICE_WARPS,
            launch_pdl=DEPENDENT_LAUNCH,
        )
        if chunks == 1:
            return
        left, level, given = chunks * top_k, level + 1, kept
