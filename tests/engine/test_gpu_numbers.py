"""On a GPU: in float32 the CPU's tokens, in bfloat16 logits as near to those of float32 as its roundings allow."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.batch import Batch
from rorqual.engine.cuda_graphs import Decoded
from rorqual.ops.sample import noise_bits, row_keys
from tests.engine.engines import TINY_OPTIONS, tiny_llm
from tests.tiny import CONFIGS, DEEPSEEK_CONFIGS, VOCAB, random_deepseek, random_model, reference_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_TOKENS = 18
MARGIN = 1e-3
"""Between the two best scores: a hundred times what float32's sums of these models differ by in another order."""

DRAWS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
}


def random_prompts(lengths: list[int], vocab_size: int = VOCAB) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


def narrowest_margin(name: str, prompt: list[int], answer: list[int], params: SamplingParams) -> float:
    """How far the best token's score is ahead of the next one's where it is least, as transformers has the logits."""
    positions = np.arange(len(prompt), len(prompt) + len(answer), dtype=np.uint64)
    scores = reference_logits(name, prompt + answer[:-1])[len(prompt) - 1 :].double()
    if not params.greedy:
        keys = torch.from_numpy(row_keys(np.full(len(answer), params.seed, np.uint64), positions))
        v = (noise_bits(torch.arange(VOCAB)[None], keys).double() + 0.5) * 2.0**-32
        scores = scores / params.temperature - torch.log(-torch.log1p(-v))
    best = scores.topk(2)
    margin = float((best.values[:, 0] - best.values[:, 1]).min())
    assert margin < MARGIN or best.indices[:, 0].tolist() == answer, "not what transformers says"
    return margin


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "mistral_window", "qwen2_windows"])
def test_float32_tokens_are_those_of_the_cpu(name: str, kind: str, device: str) -> None:
    """In steps of 16 tokens on the CPU; elsewhere in whole prompts beside each other, and by graphs on a GPU.

    Answers in which two tokens are almost equally good are left out: there the order of a sum may decide.
    """
    prompts = random_prompts([1, 2, 3, 5, 8, 9, 13, 16, 17, 21, 25, 29, 31, 32, 33, 40])
    params = DRAWS[kind]
    with tiny_llm(name) as llm:
        want = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    clear = [
        i
        for i, (prompt, answer) in enumerate(zip(prompts, want, strict=True))
        if narrowest_margin(name, prompt, answer, params) > MARGIN
    ]
    assert len(clear) >= 10, "too few answers to compare"
    with tiny_llm(name, device=device, max_num_batched_tokens=512, num_kv_blocks=400, max_num_seqs=16) as llm:
        got = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    assert [got[i] for i in clear] == [want[i] for i in clear]


UNIT = 2.0**-9
"""bfloat16's unit roundoff: half of the distance between neighbours, relative to them, at most."""
ROUNDINGS = 8
"""Per layer, on the way of the residual: two norms, q k v, attention, o, gate times up, down, and the two sums less one
that is a norm's input; two more at the end, the last norm and the logits."""
AMPLIFICATION = 4.0
"""The matrices' standard deviation is 2 / sqrt(columns), so q and k have one of 2 and attention's scores one of 4: what
they are off by, relative to themselves, a softmax's probabilities are off by four times as much."""
SPREAD = 6.0
"""Standard deviations within which a million normal values lie."""
CLEAR = 0.95
"""Share of positions that are judged: the rest may hang on a softmax or a router that is almost undecided."""

LARGER: dict[str, Any] = {  # what real kernels take: head_dim 128, more columns than a tile has
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4099,
}
LARGER_ON_CPU = LARGER | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
BFLOAT16_CASES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mistral_window": ("mistral_window", {}),
    "larger qwen3": ("qwen3", LARGER),
}


def all_logits(llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], torch.Tensor]:
    """A greedy answer, and the logits [len(prompt) + len(answer) - 1, vocab] of every position on the way to it."""
    runner, seen = llm.engine._runner, []
    compute, decode = runner.compute_logits, runner.decode

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        seen.append(logits.float().cpu())
        return logits

    def watched_decode(batch: Batch) -> Decoded:
        decoded = decode(batch)
        if runner.draws:  # in a graph, where nothing is called
            seen.append(decoded.logits.float().cpu())
        return decoded

    with monkeypatch.context() as patch:
        patch.setattr(runner, "compute_logits", watched)
        patch.setattr(runner, "decode", watched_decode)
        (out,) = llm.generate(prompt, DRAWS["greedy"].clone(prompt_logprobs=0), use_tqdm=False)
    return out.token_ids, torch.cat(seen)


def with_weights_in(model: Any, dtype: torch.dtype) -> Any:
    """The same model, whose rotary frequencies stay in float32, as `model.to(dtype)` would not leave them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.inference_mode()
def transformers_logits(model: Any, texts: list[list[int]], device: str) -> torch.Tensor:
    """[positions of all texts, vocab] float32 on the CPU."""
    return torch.cat([model(torch.tensor([text], device=device)).logits[0].float().cpu() for text in texts])


def best_rows(error: torch.Tensor) -> torch.Tensor:
    """The rows with the least error, CLEAR of all."""
    order = error.pow(2).mean(1).argsort()
    return order[: math.ceil(CLEAR * len(order))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", BFLOAT16_CASES)
def test_bfloat16_logits_are_as_near_to_float32_as_its_roundings_allow(
    case: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers in float32 with the same weights, which bfloat16 holds exactly: prompts, and decode steps.

    Of L layers, 8 L + 2 roundings lie on the way to the logits, each off by UNIT at most and independent of the others,
    so together by UNIT * sqrt(8 L + 2) of the logits' standard deviation; times AMPLIFICATION, that bounds the root
    mean square of the error. Then no single logit is off by more than SPREAD times that, and a position's KL divergence
    is half the variance of the error, in nats, as for any small one. A pipeline with these roundings, transformers' own
    in bfloat16, must not be better than the engine, which leaves some of them out.
    """
    name, options = BFLOAT16_CASES[case]
    model_type, config = CONFIGS[name]
    if options and device == "cpu":
        options = LARGER_ON_CPU
    model = with_weights_in(random_model(model_type, config | options), torch.bfloat16)
    model.save_pretrained(tmp_path)
    texts, found = [], []
    room = {"max_model_len": 160, "max_num_batched_tokens": 256, "num_kv_blocks": 400}
    with LLM(str(tmp_path), **TINY_OPTIONS | room | {"dtype": "bfloat16", "device": device}) as llm:
        assert (llm.engine._runner._graphs is not None) == (device == "cuda")
        for prompt in random_prompts([1, 7, 16, 40, 70], llm.engine.vocab_size):
            answer, logits = all_logits(llm, prompt, monkeypatch)
            texts.append(prompt + answer[:-1])
            assert len(logits) == len(texts[-1])
            found.append(logits)
    got, plain = torch.cat(found), transformers_logits(model.to(device), texts, device)
    want = transformers_logits(with_weights_in(model, torch.float32), texts, device)
    std = float(want.std())
    error, plain_error = (got - want) / std, (plain - want) / std
    clear, plain_clear = best_rows(error), best_rows(plain_error)
    rms, plain_rms = (float(e.pow(2).mean().sqrt()) for e in (error[clear], plain_error[plain_clear]))
    p, q = want[clear].log_softmax(1), got[clear].log_softmax(1)
    kl, largest = float((p.exp() * (p - q)).sum(1).mean()), float(error[clear].abs().max())
    bound = AMPLIFICATION * UNIT * (ROUNDINGS * model.config.num_hidden_layers + 2) ** 0.5
    report = f"rms {rms:.4f} of {bound:.4f}, in plain bfloat16 {plain_rms:.4f}; largest {largest:.3f}; KL {kl:.5f}"
    print(report)
    assert 0 < rms <= bound, report
    assert rms <= 1.1 * plain_rms, report
    assert largest <= SPREAD * bound, report
    assert kl <= 0.5 * (bound * std) ** 2, report
    if "moe" not in name:  # another expert's answer is another answer
        assert float(error.abs().max()) <= 2 * SPREAD * bound, report


WIDE: dict[str, dict[str, Any]] = {  # attention as published: 64 heads of 576 numbers, or of 512; experts of 256
    "deepseek_v3": {
        "hidden_size": 512,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
    },
    "deepseek_v4": {
        "hidden_size": 512,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_groups": 8,
        "o_lora_rank": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128],
        "num_hash_layers": 1,
    },
}
WIDE["deepseek_v32"] = WIDE["deepseek_v3"] | {"index_n_heads": 64, "index_head_dim": 128}
DEEPSEEK_ROUNDINGS = 14
"""As ROUNDINGS: two more of low-rank products and their norms each, two of a second product of outputs or values, and
two of experts that are added up."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WIDE)
def test_deepseek_in_bfloat16_is_as_near_to_float32_as_its_roundings_allow(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median position: the others hang on a router or an indexer that was almost undecided, and chose otherwise."""
    model_type, config = DEEPSEEK_CONFIGS[name]
    wide = WIDE[name] if device == "cuda" else {}
    if name == "deepseek_v32":  # where it chooses 24 of hundreds, most positions miss one of them in some layer
        wide = wide | {"index_topk": 512}
    model = with_weights_in(random_deepseek(model_type, config | wide), torch.bfloat16)
    with_weights_in(model, torch.float32).save_pretrained(tmp_path)
    texts, found = [], []
    room = {"max_model_len": 256, "max_num_batched_tokens": 256, "num_kv_blocks": 400}
    with LLM(str(tmp_path), **TINY_OPTIONS | room | {"dtype": "bfloat16", "device": device}) as llm:
        assert (llm.engine._runner._graphs is not None) == (device == "cuda")
        for prompt in random_prompts([1, 40, 220], VOCAB):
            answer, logits = all_logits(llm, prompt, monkeypatch)
            texts.append(prompt + answer[:-1])
            found.append(logits)
    got, want = torch.cat(found), transformers_logits(model.to(device), texts, device)
    by_position = ((got - want) / want.std()).pow(2).mean(1).sqrt()
    middle, bound = (
        float(by_position.median()),
        AMPLIFICATION * UNIT * (DEEPSEEK_ROUNDINGS * len(model.model.layers) + 2) ** 0.5,
    )
    report = f"{middle:.4f} of {bound:.4f}; most {float(by_position.max()):.3f}"
    print(report)
    assert 0 < middle <= bound, report
    assert float(by_position.max()) < 2.0, report  # unrelated logits are 1.4 apart
