"""A model run chunk by chunk over a paged cache whose blocks are scattered, and filled with NaN before."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.cache.spec import group_caches
from rorqual.cache.storage import KVStorage
from rorqual.distributed.mesh import Mesh
from rorqual.engine.batch_builder import build_batch
from rorqual.layers.decoder import Placement
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.weights import load_weights, prepare_weights
from rorqual.models.registry import build_model
from rorqual.sequence import Chunk, Sequence
from tests.tiny import VOCAB

MAX_LEN = 512
CPU = torch.device("cpu")


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random ids of the tiny vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def loaded_model(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The model of a folder, ready to run; options as `Placement` takes them."""
    checkpoint = open_checkpoint(folder)
    place = Placement(
        options.pop("mesh", Mesh.single()), dtype, CPU, options.pop("kv_cache_dtype", dtype), MAX_LEN, **options
    )
    model = build_model(checkpoint.config, place)
    assert isinstance(model, torch.nn.Module)
    load_weights(model, checkpoint, tied_tensors=model.tied_tensors, num_threads=1)
    prepare_weights(model)
    return model


class Step(NamedTuple):
    """One chunk's batch, which tokens of the text are in it, and the cache to run it on."""

    batch: Batch
    part: slice
    kv: KVStorage


def steps(
    model: Any,
    token_ids: list[int],
    chunk_size: int,
    *,
    block_size: int = 4,
    num_prompt: int | None = None,
    at_once: range = range(0),
) -> Iterator[Step]:
    """The text in chunks, those of at_once in one of their own; its first num_prompt tokens (default: all) are a
    prompt."""
    groups = group_caches(model.kv_specs)
    paging = [group.paging(block_size) for group in groups]
    rng = random.Random(1)
    counts = [lie.blocks_for(len(token_ids)) for lie in paging]
    kv = KVStorage(groups, [2 * count for count in counts], block_size=block_size, device=CPU)
    for memory in kv.tensors():  # what nobody wrote must reach nothing
        if memory.dtype.is_floating_point:
            memory.fill_(float("nan"))
        else:
            memory.fill_(0x7F)  # NaN in e4m3, 2^128 as a scale
    seq = Sequence(0, list(token_ids), num_prompt or len(token_ids), MAX_LEN)
    seq.block_tables = [array("i", rng.sample(range(2 * count), count)) for count in counts]
    starts = [
        *range(0, at_once.start, chunk_size),
        *([at_once.start] if at_once else []),
        *range(at_once.stop, len(token_ids), chunk_size),
    ]
    for start, stop in itertools.pairwise([*starts, len(token_ids)]):
        chunk = Chunk(seq, start, stop)
        batch, _ = build_batch([chunk], [True], paging=paging, device=CPU)
        yield Step(batch, slice(chunk.start, chunk.stop), kv)


@torch.inference_mode()
def logits_by_chunks(model: Any, token_ids: list[int], chunk_size: int, **options: Any) -> torch.Tensor:
    """Logits of every token [num_tokens, vocab]; options as `steps` takes them."""
    found = []
    for batch, _, kv in steps(model, token_ids, chunk_size, **options):
        found.append(model.compute_logits(model(batch, kv)[batch.logits_indices]))  # tokens of answers stand in front
    return torch.cat(found)
