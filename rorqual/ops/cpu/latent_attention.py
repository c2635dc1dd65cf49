"""Latent attention on CPU: absorbed for answers' tokens; a prompt's rows are expanded into keys and values once."""

from __future__ import annotations

import torch

from rorqual.batch import Batch
from rorqual.ops.cpu.row_attention import answers, blocks, hidden_of, prompts, seen_by, softmax
from rorqual.ops.latent_attention import LatentUp, latent_attention
from rorqual.ops.row_attention import RowSource, attend
from rorqual.ops.row_cache import read_rows


def _refuse(query: torch.Tensor, *_args: object, **_options: object) -> str | None:
    return None if query.is_cpu else f"needs CPU tensors, got {query.device.type}"


@latent_attention.impl("cpu", refuse=_refuse)
def latent_attention_cpu(
    query: torch.Tensor, source: RowSource, up: LatentUp, batch: Batch, *, scale: float
) -> torch.Tensor:
    """See the reference."""
    _, rank, nope = up.key.shape
    out = query.new_empty(*query.shape[:2], up.value.shape[1])
    for some in answers(batch, [source], query.shape[1] + rank + query.shape[2] - nope):
        by_head = query[some].transpose(0, 1)
        absorbed = torch.cat((torch.bmm(by_head[..., :nope], up.key.transpose(1, 2)), by_head[..., nope:]), dim=-1)
        seen = attend(absorbed.transpose(0, 1), [source], batch, some, scale=scale, value_dim=rank, sinks=None)
        out[some] = torch.bmm(seen.transpose(0, 1), up.value.transpose(1, 2)).transpose(0, 1)
    for seq, part in prompts(batch):
        seen_rows = seen_by(source, seq, part, batch)
        hidden = hidden_of([seen_rows], part.stop - part.start)
        rows = read_rows(source.cache, seen_rows.slots).to(query.dtype)
        latents = rows[:, :rank].expand(len(up.key), -1, -1)
        keys = torch.bmm(latents, up.key)  # [num_heads, n, nope_dim]
        keys = torch.cat((keys, rows[:, rank:].expand(len(keys), -1, -1)), dim=-1)
        values = torch.bmm(latents, up.value.transpose(1, 2))
        for some in blocks(part, query.shape[1] * len(rows)):
            scores = torch.bmm(query[some].transpose(0, 1), keys.transpose(1, 2)).float().mul_(scale)
            if hidden is not None:
                scores.masked_fill_(hidden[some.start - part.start : some.stop - part.start], float("-inf"))
            weights = softmax(scores, None).to(query.dtype)
            out[some] = torch.bmm(weights, values).transpose(0, 1)
    return out
