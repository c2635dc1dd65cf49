"""DeepSeek-V4's compressor: several tokens' vectors pooled into one cached entry, by gates."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.ops.kv_transform import HadamardStage, NormStage, RopeStage
from rorqual.ops.registry import op
from rorqual.ops.row_attention import seq_of_token
from rorqual.ops.row_cache import RowCache, prepare_rows, read_rows, write_rows


class Compression(NamedTuple):
    """How entries are made of tokens."""

    ratio: int
    """Tokens per entry."""
    overlap: bool
    """Whether an entry also pools the tokens of the window before, by vectors of their own."""
    position_bias: torch.Tensor
    """float32 [ratio, c * width], added to the gates by position in the window; c = 2 with overlap, else 1."""
    norm: NormStage
    cos_sin: torch.Tensor
    """float32 [max_position, R]: the table that the last R channels are rotated by, interleaved."""
    hadamard: HadamardStage | None = None


@op
def compress_rows(
    projected: torch.Tensor,
    states: RowCache,
    entries: RowCache,
    batch: Batch,
    compression: Compression,
    *,
    dtype: torch.dtype,
) -> None:
    """Write the tokens' rows of state, and the entries that they complete.

    With K and Z the halves of a token's row (Z with its position's bias), the entry of the window that ends at position
    p, for each channel: sum over tokens i of softmax_i(Z_i) K_i. With overlap K and Z have two parts: the first is used
    by the entry of the window after, the second by the token's own; the first window of a sequence has none before it.
    Then norm, rotation by the position of the window's first token, Hadamard. float32 up to here; entries are rounded
    to `dtype` before norm, rotation and Hadamard, as activations are.

    Args:
        projected: float32 [num_tokens, 2 * c * width]: K, then Z without the bias.
        states: float32 rows of that width, one per token; written for every token, then read for the tokens of this and
            the last window, which may belong to earlier steps.
        entries: written at the slot of each token that completes a window, in the entries' group; see CacheView.

    Source: DeepSeek-V4's compressed sparse and heavily compressed attention.
    """
    ratio, width = compression.ratio, compression.norm.weight.shape[0]
    gate = projected.shape[1] // 2
    biased = projected.clone()
    biased[:, gate:] += compression.position_bias[batch.positions % ratio]
    state_slots = batch.caches[states.group].slot_mapping
    kept = (state_slots >= 0).nonzero().squeeze(1)
    write_rows(states, state_slots[kept].long(), biased[kept])

    entry_slots = batch.caches[entries.group].slot_mapping
    done = (entry_slots >= 0).nonzero().squeeze(1)
    last = batch.positions[done]
    spans = 2 if compression.overlap else 1
    at = last[:, None] - spans * ratio + 1 + torch.arange(spans * ratio, device=last.device)
    tables = batch.caches[states.group].block_tables
    blocks = tables[seq_of_token(batch)[done, None], at.clamp(min=0) // states.rows_per_block]
    rows = read_rows(states, blocks * states.rows_per_block + at.clamp(min=0) % states.rows_per_block)
    values, gates = rows[..., :gate], rows[..., gate:]
    if compression.overlap:  # each token's part for its window: the first for the next one, the second for its own
        values, gates = (
            torch.cat((both[:, :ratio, :width], both[:, ratio:, width:]), dim=1) for both in (values, gates)
        )
    gates = gates.masked_fill((at < 0)[..., None], float("-inf"))
    pooled = (gates.softmax(1) * values.masked_fill((at < 0)[..., None], 0.0)).sum(1)
    rope = RopeStage(last - ratio + 1, compression.cos_sin, interleaved=True)
    made = prepare_rows(pooled.to(dtype), norm=compression.norm, rope=rope, hadamard=compression.hadamard)
    write_rows(entries, entry_slots[done].long(), made)
