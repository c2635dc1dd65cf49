"""benchmarks/gpu_engine.py: the models that it makes, and what its tables say of results."""

import pytest

from benchmarks.gpu_engine import MODELS, PARTS, PEERS, TARGETS, figure, report
from rorqual.config import EngineConfig
from rorqual.engine.resolved_config import resolve
from rorqual.engine.roofline import model_cost

PUBLISHED = {"qwen3-0.6b": (0.6e9, 0.6e9), "qwen3-8b": (8.2e9, 8.2e9), "qwen3-30b-a3b": (30.5e9, 3.3e9)}
"""Parameters and those that one token meets, with the head and, of an untied model, the embedding."""


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_published_sizes(name):
    config = MODELS[name]
    cost = model_cost(config, resolve(EngineConfig(dtype="bfloat16", device="cpu", num_kv_blocks=64), config))
    table = 0 if config["tie_word_embeddings"] else cost.head_values
    plain = cost.dense_values + cost.head_values + table
    experts = [(kind.num_layers * kind.values_per_expert, kind.num_experts, kind.top_k) for kind in cost.experts]
    whole, met = (plain + sum(each[0] * each[n] for each in experts) for n in (1, 2))
    assert (whole, met) == pytest.approx(PUBLISHED[name], rel=0.02)


def part(seconds, least, prompt, output):
    about = {"gpus": ["a card"], "cores": 4, "cpu": "a cpu", "date": "2026-01-02T03:04", "commit": None, "versions": {}}
    return {
        "total_s": seconds, "floor": {"total_s": least}, "prompt_tokens": prompt, "output_tokens": output,
        "start_s": 9.0, "num_steps": 10, "stage_s": {"forward": seconds}, "about": about, "first_token_ms": 7.0,
        "between_tokens_ms": 1.5,
    }  # fmt: skip


def test_figures_are_in_the_unit_of_their_targets():
    parts = {
        "throughput": part(10, 5, 100, 200_000),
        "latency": part(0.512, 0.128, 1024, 256),
        "prefill": part(2, 1.6, 800_000, 64),
    }
    assert figure(parts, "throughput") == (20_000, 40_000)
    assert figure(parts, "latency") == (2.0, 0.5)
    assert figure(parts, "prefill") == (400_000, 500_000)
    assert figure(parts, "start") == (9.0, None)
    assert figure({}, "prefill") is figure({}, "start") is None
    text = report({"models": {"qwen3-8b": parts}})
    assert "| 256 requests, output tok/s | 20,000 | 10,800 | 40,000 | 50% | 9,236 | 9,038 | 9,036 | 8,085 |" in text
    assert "| one request, ms per output token | 2.00 | 4.30 | 0.50 | 25% | 5.32 |" in text
    assert "a card, 4 cores (a cpu); ; 2026-01-02, commit not recorded" in text


def test_targets_and_peers_are_of_the_models_that_run():
    assert TARGETS.keys() == PEERS.keys() == MODELS.keys()
    assert {"throughput", "latency", "prefill"} < set(PARTS)
