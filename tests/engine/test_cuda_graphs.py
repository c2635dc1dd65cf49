"""Decode steps by CUDA graph, and those started before the last is read, give the tokens of eager ones."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from rorqual import SamplingParams
from rorqual.engine.cuda_graphs import graph_sizes
from rorqual.engine.prompt_graphs import prompt_sizes
from tests.engine.engines import tiny_llm


def test_graph_sizes_end_with_the_most_sequences() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(100)[-2:] == [96, 100]
    for most in (3, 16, 17, 256, 700):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


def test_prompt_sizes_end_with_the_largest_step_and_lie_close_enough() -> None:
    assert prompt_sizes(16) == [16]
    assert prompt_sizes(100) == [16, 32, 64, 100]
    for most in (17, 1024, 1100, 8192, 16384):
        sizes = prompt_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))
        assert all(b <= 4 / 3 * a for a, b in itertools.pairwise(sizes) if a >= 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama", "mistral_window", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_steps_ahead_do_not_change_tokens(model: str, dtype: str) -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(1, 60) for _ in range(draw.randint(1, 30))] for _ in range(20)]
    params = [
        SamplingParams(temperature=draw.choice((0.0, 0.9)), seed=i, max_tokens=draw.randint(1, 25), ignore_eos=True)
        for i in range(20)
    ]
    answers = []
    for eager, ahead in ((True, False), (False, False), (False, True)):
        # Few blocks: sequences are preempted, and batches shrink and grow through all sizes.
        options = {"num_kv_blocks": 40, "enforce_eager": eager, "async_scheduling": ahead}
        with tiny_llm(model, device="cuda", dtype=dtype, **options) as llm:
            graphs = llm.engine._runner._graphs
            assert (graphs is None) == (llm.engine._runner._prompt_graphs is None) == eager
            answers.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.engine.scheduler.num_preemptions > 0 or model == "mistral_window"  # keeps few blocks
            assert ("wait" in llm.engine.stats.seconds) == ahead
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama", "mistral_window"])
@pytest.mark.parametrize("eager", [False, True])
def test_steady_steps_wait_for_tokens_alone(model: str, eager: bool) -> None:
    """Whatever else makes the host wait for the device raises: .item(), copies from unpinned memory, and the like."""
    with tiny_llm(model, device="cuda", dtype="bfloat16", num_kv_blocks=200, enforce_eager=eager) as llm:
        engine, done = llm.engine, []
        for i in range(8):  # six go on through all that is looked at, two end meanwhile
            options = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
            params = SamplingParams(max_tokens=50 if i < 6 else 15, ignore_eos=True, **options)
            engine.add_request([3, 4, 5 + i], params, on_finish=done.append)
        while engine._flight is None:
            engine.step()
        for _ in range(6):  # the prompts; compiles what is compiled
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(30):
                engine.step()
                assert engine._flight is not None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(done) == 2
        while engine.has_work:
            engine.step()
        assert [len(out.token_ids) for out in done] == [15] * 2 + [50] * 6
