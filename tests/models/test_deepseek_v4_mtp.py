"""DeepSeek-V4's block that predicts a further token, against a loop over tokens; and checkpoints that hold others."""

from __future__ import annotations

import functools
import json
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.models.scattered import loaded_model, steps, tokens
from tests.tiny import DEEPSEEK_CONFIGS, VOCAB, reference_model

NAME = "deepseek_v4_window"
C = DEEPSEEK_CONFIGS[NAME][1]
D, N, HEADS, WIDTH, ROPE = 48, 4, C["num_attention_heads"], C["head_dim"], C["qk_rope_head_dim"]
GROUPS, LOW, EXPERTS, INNER = C["o_groups"], C["o_lora_rank"], C["n_routed_experts"], C["moe_intermediate_size"]
LENGTH = 60
Tensors = dict[str, torch.Tensor]


def drawn_block() -> Tensors:
    """The tensors of mtp.0, of any values."""
    shapes = {
        **dict.fromkeys(("e_proj.weight", "h_proj.weight"), (D, D)),
        **{f"{name}.weight": (D,) for name in ("enorm", "hnorm", "norm", "attn_norm", "ffn_norm")},
        "attn.q_norm.weight": (C["q_lora_rank"],),
        "attn.kv_norm.weight": (WIDTH,),
        "attn.wq_a.weight": (C["q_lora_rank"], D),
        "attn.wq_b.weight": (HEADS * WIDTH, C["q_lora_rank"]),
        "attn.wkv.weight": (WIDTH, D),
        "attn.wo_a.weight": (GROUPS * LOW, HEADS * WIDTH // GROUPS),
        "attn.wo_b.weight": (D, GROUPS * LOW),
        "attn.attn_sink": (HEADS,),
        "ffn.gate.weight": (EXPERTS, D),
        "ffn.gate.bias": (EXPERTS,),
        "hc_head_fn": (N, N * D),
        "hc_head_base": (N,),
        "hc_head_scale": (1,),
    }
    for kind in ("attn", "ffn"):
        shapes |= {f"hc_{kind}_fn": ((2 + N) * N, N * D), f"hc_{kind}_base": ((2 + N) * N,), f"hc_{kind}_scale": (3,)}
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(EXPERTS))):
        shapes |= {f"ffn.{expert}.w{k}.weight": (INNER, D) for k in (1, 3)}
        shapes[f"ffn.{expert}.w2.weight"] = (D, INNER)
    draw, made = torch.Generator().manual_seed(5), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=draw)
        norm = name.endswith("norm.weight")
        made[f"mtp.0.{name}"] = (
            noise * 0.1 + 1 if norm else noise * shape[-1] ** -0.5 if len(shape) > 1 else noise * 0.3
        )
    return made


@functools.cache
def folder_with(kind: str) -> Path:
    """A checkpoint with further tensors: "block", or DSpark's "drafts"."""
    folder = Path(tempfile.mkdtemp(prefix=f"rorqual-v4-{kind}-"))
    model = reference_model(NAME)
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    further = drawn_block()
    if kind == "drafts":
        gone = ("mtp.0.e_proj", "mtp.0.h_proj", "mtp.0.enorm", "mtp.0.hnorm")
        further = {name: t for name, t in further.items() if not name.startswith(gone)}
        further |= {"mtp.0.main_proj.weight": torch.ones(D, 3 * D), "mtp.2.markov_head.markov_w1": torch.ones(2, 2)}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def rms(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    y = x * (x.square().mean() + 1e-6).rsqrt()
    return y if weight is None else y * weight


def turned(x: torch.Tensor, position: int, sign: int) -> torch.Tensor:
    """One head, whose last channels are rotated in pairs of neighbours, without scaling."""
    out = x.clone()
    for pair in range(ROPE // 2):
        angle = sign * position * C["rope_theta"] ** (-2 * pair / ROPE)
        at = WIDTH - ROPE + 2 * pair
        a, b = x[at], x[at + 1]
        out[at] = a * math.cos(angle) - b * math.sin(angle)
        out[at + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


def plain_block(w: Tensors, streams: torch.Tensor, next_ids: list[int]) -> torch.Tensor:
    """Logits of every token: streams [num_tokens, N, D] of the main model, float64 throughout."""
    w = {name.removeprefix("model."): t.double() if t.is_floating_point() else t for name, t in w.items()}
    p = {name.removeprefix("mtp.0."): t for name, t in w.items() if name.startswith("mtp.0.")}
    embed, head = w["embed_tokens.weight"], w["head.weight"]

    def weights_of(h: torch.Tensor, kind: str) -> torch.Tensor:
        flat = h.flatten()
        return (p[f"hc_{kind}_fn"] @ flat) * (flat.square().mean() + 1e-6).rsqrt()

    def mixed(h: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m, scale, base = weights_of(h, kind), p[f"hc_{kind}_scale"], p[f"hc_{kind}_base"]
        eps = C["hc_eps"]
        pre = torch.sigmoid(m[:N] * scale[0] + base[:N]) + eps
        post = 2 * torch.sigmoid(m[N : 2 * N] * scale[1] + base[N : 2 * N])
        comb = (m[2 * N :] * scale[2] + base[2 * N :]).view(N, N).softmax(1) + eps
        comb = comb / (comb.sum(0) + eps)
        for _ in range(C["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0) + eps)
        return rms(pre @ h, p[f"{kind}_norm.weight"]), post, comb

    def expert(x: torch.Tensor, name: str) -> torch.Tensor:
        limit = C["swiglu_limit"]
        gate, up = p[f"ffn.{name}.w1.weight"] @ x, p[f"ffn.{name}.w3.weight"] @ x
        return p[f"ffn.{name}.w2.weight"] @ (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))

    keys, found = [], []
    for t, (h_main, following) in enumerate(zip(streams.double(), next_ids, strict=True)):
        from_token = p["e_proj.weight"] @ rms(embed[following], p["enorm.weight"])
        h = torch.stack([p["h_proj.weight"] @ rms(h_main[s], p["hnorm.weight"]) + from_token for s in range(N)])

        x, post, comb = mixed(h, "attn")
        keys.append(turned(rms(p["attn.wkv.weight"] @ x, p["attn.kv_norm.weight"]), t, 1))
        seen = torch.stack(keys[max(0, t - C["sliding_window"] + 1) :])
        low = rms(p["attn.wq_a.weight"] @ x, p["attn.q_norm.weight"])
        outs = []
        for head_index, query in enumerate((p["attn.wq_b.weight"] @ low).view(HEADS, WIDTH)):
            scores = seen @ turned(rms(query), t, 1) * WIDTH**-0.5
            shares = torch.cat((scores, p["attn.attn_sink"][head_index : head_index + 1])).softmax(0)[:-1]
            outs.append(turned(shares @ seen, t, -1))
        groups = torch.cat(outs).view(GROUPS, -1)
        by_group = [p["attn.wo_a.weight"][g * LOW : (g + 1) * LOW] @ groups[g] for g in range(GROUPS)]
        y = p["attn.wo_b.weight"] @ torch.cat(by_group)
        h = torch.stack([post[k] * y + sum(comb[j, k] * h[j] for j in range(N)) for k in range(N)])

        x, post, comb = mixed(h, "ffn")
        scores = F.softplus(p["ffn.gate.weight"] @ x).sqrt()
        chosen = (scores + p["ffn.gate.bias"]).topk(C["num_experts_per_tok"]).indices.tolist()
        y = expert(x, "shared_experts")
        for e in chosen:
            y = y + scores[e] / scores[chosen].sum() * C["routed_scaling_factor"] * expert(x, f"experts.{e}")
        h = torch.stack([post[k] * y + sum(comb[j, k] * h[j] for j in range(N)) for k in range(N)])

        pre = torch.sigmoid(weights_of(h, "head") * p["hc_head_scale"] + p["hc_head_base"]) + C["hc_eps"]
        found.append(head @ rms(pre @ h, p["norm.weight"]))
    return torch.stack(found)


@torch.inference_mode()
def streams_and_logits(model: Any, token_ids: list[int], chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    following = torch.tensor([*token_ids[1:], 7])
    streams, logits = [], []
    for batch, part, kv in steps(model, token_ids, chunk_size):
        streams.append(model.streams(batch, kv))
        logits.append(model.compute_logits(model.predict_next(streams[-1], following[part], batch, kv)))
    return torch.cat(streams), torch.cat(logits)


@pytest.mark.parametrize("chunk_size", [1, 7, LENGTH])
def test_further_logits_are_those_of_a_loop(chunk_size):
    """From the streams of token t and the embedding of token t + 1; the window of 16 ends within the text."""
    model, token_ids = loaded_model(folder_with("block"), with_mtp=True), tokens(LENGTH)
    assert len(model.mtp) == 1
    streams, got = streams_and_logits(model, token_ids, chunk_size)
    (file,) = folder_with("block").glob("*.safetensors")
    want = plain_block(load_file(file), streams, [*token_ids[1:], 7])
    assert want.shape == (LENGTH, VOCAB)
    assert (got - want).abs().max() < 5e-5


def test_the_block_has_a_window_of_its_own_in_the_windows_group():
    model = loaded_model(folder_with("block"), with_mtp=True)
    assert model.kv_specs[-1] == model.kv_specs[0]
    assert len(model.kv_specs) == len(loaded_model(folder_with("block")).kv_specs) + 1


@pytest.mark.parametrize("kind", ["block", "drafts"])
def test_further_blocks_are_left_unread_and_said_so(kind, caplog):
    with caplog.at_level(logging.INFO):
        model = loaded_model(folder_with(kind))
    assert "the model does not read" in caplog.text
    assert "mtp.0.attn.attn_sink" in caplog.text
    assert not model.mtp
    with pytest.raises(ValueError, match="built without a block that predicts further tokens"):
        model.predict_next(torch.zeros(1, N, D), torch.zeros(1, dtype=torch.int64), None, None)


def test_drafts_are_no_block_that_predicts_further_tokens():
    """They would be half loaded: most names are the same."""
    with pytest.raises(ValueError, match=r"mtp\.0\.main_proj\.weight belongs to DSpark's draft blocks"):
        loaded_model(folder_with("drafts"), with_mtp=True)


def test_a_checkpoint_without_the_block_is_refused_with_it(tmp_path):
    reference_model(NAME).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with pytest.raises(ValueError, match=r"missing: mtp\.0\."):
        loaded_model(tmp_path, with_mtp=True)
