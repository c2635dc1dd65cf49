"""Every architecture against transformers in float32: logits at once and cached, greedy tokens."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from rorqual import SamplingParams
from rorqual.cache.spec import group_caches
from rorqual.cache.storage import KVStorage
from rorqual.distributed.mesh import Mesh
from rorqual.engine.batch_builder import build_batch
from rorqual.layers.decoder import Placement
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.weights import load_weights, prepare_weights
from rorqual.models.registry import build_model
from rorqual.sequence import Chunk, Sequence
from tests.engine.engines import tiny_llm
from tests.tiny import CONFIGS, VOCAB, checkpoint_folder, reference_greedy, reference_logits

BLOCK_SIZE = 4
MAX_LEN = 96


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def logits_by_chunks(
    name: str, token_ids: list[int], chunk_size: int, *, kv_cache_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits of every token, computed in chunks through a paged cache whose blocks are scattered."""
    checkpoint = open_checkpoint(checkpoint_folder(name))
    cpu = torch.device("cpu")
    model = build_model(checkpoint.config, Placement(Mesh.single(), torch.float32, cpu, kv_cache_dtype, MAX_LEN))
    load_weights(model, checkpoint, tied_tensors=model.tied_tensors, num_threads=1)
    prepare_weights(model)
    groups = group_caches(model.kv_specs)
    paging = [group.paging(BLOCK_SIZE) for group in groups]
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    kv = KVStorage(groups, [2 * num_blocks] * len(groups), block_size=BLOCK_SIZE, device=cpu)
    for layer in range(len(model.kv_specs)):
        kv[layer].key.fill_(float("nan"))  # what nobody wrote must reach nothing
        kv[layer].value.fill_(float("nan"))
    seq = Sequence(0, list(token_ids), len(token_ids), MAX_LEN)
    rng = random.Random(1)
    seq.block_tables = [array("i", rng.sample(range(2 * num_blocks), num_blocks)) for _ in groups]
    found = []
    for start in range(0, len(token_ids), chunk_size):
        chunk = Chunk(seq, start, min(start + chunk_size, len(token_ids)))
        batch, _ = build_batch([chunk], [True], paging=paging, device=cpu)
        with torch.inference_mode():
            found.append(model.compute_logits(model(batch, kv)))
    return torch.cat(found)


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, chunk_size):
    token_ids = tokens(40)
    got, want = logits_by_chunks(name, token_ids, chunk_size), reference_logits(name, token_ids)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers(name):
    prompts = [tuple(tokens(length, seed=length)) for length in (1, 5, 16, 33)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 16, "num_kv_blocks": 100}
    with tiny_llm(name, **options) as llm:
        outputs = llm.generate([list(p) for p in prompts], params, use_tqdm=False)
    assert [out.token_ids for out in outputs] == [reference_greedy(name, prompt, 24) for prompt in prompts]
