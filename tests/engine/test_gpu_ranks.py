"""Ranks on GPUs: by NCCL where each has one, else through the host."""

from __future__ import annotations

import pytest
import torch

from rorqual import SamplingParams
from rorqual.distributed.rank_group import RankGroup
from tests.engine.engines import tiny_llm
from tests.tiny import VOCAB

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v4"])
def test_two_ranks_answer_as_one_does(model):
    prompts = [[(7 * i + 3 * j) % (VOCAB - 2) + 2 for j in range(3 + 9 * i)] for i in range(5)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for ranks in (1, 2):
        options = {"device": "cuda", "dtype": "float32", "check_ranks": True, "tensor_parallel_size": ranks}
        with tiny_llm(model, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            recorded = llm.engine._runner._graphs is not None
            assert recorded == (ranks == 1 or torch.cuda.device_count() > 1)
    assert found[0] == found[1]


def test_sums_by_nccl_are_recorded_in_graphs():
    """With one rank, as there may be one GPU only: what it takes to record them is the same."""
    store = torch.distributed.HashStore()
    group = RankGroup(store, 0, 1, backend="nccl", device=torch.device("cuda", 0))
    x = torch.arange(1024, device="cuda").float()
    group.gather(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = group.all_reduce(x)
    x.fill_(3)
    graph.replay()
    assert torch.equal(found, torch.full((1024,), 3.0, device="cuda"))
    group.close()
