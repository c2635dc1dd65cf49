"""A mixture of experts on a GPU: decode steps are CUDA graphs, and tokens depend neither on that nor on company."""

from __future__ import annotations

import random

import pytest

from rorqual import SamplingParams
from tests.engine.engines import tiny_llm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_moe_raw"])
def test_tokens_are_the_same_by_graphs_and_alone(model: str, dtype: str) -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(1, 60) for _ in range(draw.randint(1, 30))] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = []
    for eager in (True, False):
        with tiny_llm(model, device="cuda", dtype=dtype, enforce_eager=eager) as llm:
            assert llm.engine.kernels["fused_experts"] == llm.engine.kernels["route_softmax"] == "triton"
            assert (llm.engine._runner._graphs is None) == eager
            answers.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    with tiny_llm(model, device="cuda", dtype=dtype, max_num_seqs=1, enable_prefix_caching=False) as llm:
        answers.append([llm.generate(prompt, params, use_tqdm=False)[0].token_ids for prompt in prompts])
    assert answers[0] == answers[1] == answers[2]


def test_experts_that_run_as_the_reference_does_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference asks the device which experts were chosen, which a graph cannot."""
    moe = pytest.importorskip("rorqual.ops.triton.moe")
    monkeypatch.setattr(moe, "_make_plan", lambda _experts: moe._Plan("does not, for this test"))
    with tiny_llm("qwen3_moe", device="cuda", dtype="bfloat16") as llm:
        assert llm.engine.kernels["fused_experts"] == "reference"
        assert llm.engine._runner._graphs is None
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        assert len(llm.generate([3, 4, 5], params, use_tqdm=False)[0].token_ids) == 4
