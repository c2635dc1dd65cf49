"""The next-token block of DeepSeek-V3 checkpoints: read, left out, and its logits against plain loops."""

from __future__ import annotations

import functools
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.scattered import loaded_model, logits_by_chunks, steps, tokens
from tests.quantized import Tensors, edited, save
from tests.tiny import DEEPSEEK_CONFIGS, checkpoint_folder, edit_config

NAMES = ["deepseek_v3", "deepseek_v3_noqlora", "deepseek_v32"]
LAYERS = DEEPSEEK_CONFIGS["deepseek_v3"][1]["num_hidden_layers"]
BLOCK = f"model.layers.{LAYERS}."


@functools.cache
def with_block(name: str, folder: Path) -> Path:
    """The tiny checkpoint and a block, whose layer is the last one with its numbers in another order."""
    folder = folder / name
    shutil.copytree(checkpoint_folder(name), folder)
    edit_config(folder, num_nextn_predict_layers=1)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    draw = torch.Generator().manual_seed(7)
    for key in sorted(tensors):
        if key.startswith(f"model.layers.{LAYERS - 1}."):
            tensor = tensors[key]
            mixed = tensor.flatten()[torch.randperm(tensor.numel(), generator=draw)].view(tensor.shape)
            tensors[key.replace(f"layers.{LAYERS - 1}.", f"layers.{LAYERS}.")] = mixed
    size = tensors["model.norm.weight"].shape[0]
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{BLOCK}{norm}.weight"] = 1 + 0.2 * torch.randn(size, generator=draw)
    tensors[f"{BLOCK}eh_proj.weight"] = torch.randn(size, 2 * size, generator=draw) / (2 * size) ** 0.5
    tensors[f"{BLOCK}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{BLOCK}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save(folder, tensors)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.mark.parametrize("chunk_size", [1, 7, 50])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_block(folder, name, chunk_size):
    """What it makes of the model's state of token t and of token t + 1, with a cache of its own."""
    token_ids = tokens(51)
    model = loaded_model(with_block(name, folder), with_mtp=True)
    got, states = [], []
    with torch.inference_mode():
        for batch, part, kv in steps(model, token_ids[:-1], chunk_size):
            states.append(model(batch, kv))
            next_ids = torch.tensor(token_ids[part.start + 1 : part.stop + 1])
            got.append(model.compute_logits(model.predict_next(states[-1], next_ids, batch, kv)))
        want = PlainBlock(name, with_block(name, folder)).logits(torch.cat(states), token_ids[1:])
    assert (torch.cat(got) - want).abs().max() < 5e-5
    assert want.std() > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_it_leaves_it_unread(folder, name):
    token_ids = tokens(30)
    model = loaded_model(with_block(name, folder))
    plain = loaded_model(checkpoint_folder(name))
    assert len(model.kv_specs) == LAYERS
    assert torch.equal(logits_by_chunks(model, token_ids, 30), logits_by_chunks(plain, token_ids, 30))
    with pytest.raises(ValueError, match=r"next-token block 0 is not there.*with_mtp"):
        model.predict_next(torch.empty(0), torch.empty(0), None, None)


def test_a_checkpoint_without_it_is_refused_when_it_is_asked_for(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint_folder("deepseek_v3"), folder)
    edit_config(folder, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.3\.eh_proj\.weight"):
        loaded_model(folder, with_mtp=True)


def test_layers_beyond_the_blocks_are_left_over(folder, tmp_path):
    def add(tensors: Tensors) -> None:
        tensors["model.layers.4.enorm.weight"] = torch.ones(48)

    edited(shutil.copytree(with_block("deepseek_v3", folder), tmp_path / "copy"), add)
    for with_mtp in (False, True):
        with pytest.raises(ValueError, match=r"1 left over: model\.layers\.4\.enorm\.weight"):
            loaded_model(tmp_path / "copy", with_mtp=with_mtp)


def test_an_embedding_of_its_own_is_told(folder, tmp_path, caplog):
    def change(tensors: Tensors) -> None:
        tensors[f"{BLOCK}embed_tokens.weight"][3] += 1

    edited(shutil.copytree(with_block("deepseek_v3", folder), tmp_path / "copy"), change)
    with caplog.at_level(logging.WARNING):
        loaded_model(tmp_path / "copy", with_mtp=True)
    assert f"{BLOCK}embed_tokens.weight differs from model.embed_tokens.weight" in caplog.text


# --- plain loops


class PlainBlock:
    """The block in float64, a token at a time: keys and values of every head, all experts one by one."""

    def __init__(self, name: str, folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        self.tensors = {key: tensor.double() for key, tensor in load_file(file).items()}
        self.config = DEEPSEEK_CONFIGS[name][1]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[f"{BLOCK}{name}.weight"]

    def logits(self, hidden: torch.Tensor, next_ids: list[int]) -> torch.Tensor:
        embedded = self.tensors["model.embed_tokens.weight"][next_ids]
        joined = torch.cat((self.norm(embedded, "enorm"), self.norm(hidden.double(), "hnorm")), dim=-1)
        x = joined @ self["eh_proj"].T
        x = x + self.attention(self.norm(x, "input_layernorm"))
        x = x + torch.stack([self.experts(row) for row in self.norm(x, "post_attention_layernorm")])
        return (self.norm(x, "shared_head.norm") @ self.tensors["lm_head.weight"].T).float()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self[name]

    def turned(self, x: torch.Tensor, position: int, *, halves: bool = False) -> torch.Tensor:
        """Pairs (2i, 2i + 1), or (i, i + half), by YaRN's angles."""
        size, out = x.shape[-1], x.clone()
        yarn = self.config["rope_scaling"]
        for i in range(size // 2):
            speed = self.config["rope_theta"] ** (-2 * i / size)
            if yarn:

                def pair_of(turns: float) -> float:
                    length = 2 * math.log(self.config["rope_theta"])
                    return size * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)) / length

                low = max(math.floor(pair_of(yarn["beta_fast"])), 0)
                high = min(math.ceil(pair_of(yarn["beta_slow"])), size - 1)
                slowed = min(max((i - low) / max(high - low, 0.001), 0), 1)
                speed = speed * (1 - slowed) + speed / yarn["factor"] * slowed
            c, s = math.cos(position * speed), math.sin(position * speed)
            a, b = (i, i + size // 2) if halves else (2 * i, 2 * i + 1)
            out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
        return out

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        config, heads = self.config, self.config["num_attention_heads"]
        nope, rope, rank = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
        scale = (nope + rope) ** -0.5
        if yarn := config["rope_scaling"]:
            scale *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2
        up = self["self_attn.kv_b_proj"].view(heads, nope + config["v_head_dim"], rank)
        latents, rotated, index_keys, out = [], [], [], []
        for position, row in enumerate(x):
            joint = self["self_attn.kv_a_proj_with_mqa"] @ row
            latents.append(self.norm(joint[:rank], "self_attn.kv_a_layernorm"))
            rotated.append(self.turned(joint[rank:], position))
            if config["q_lora_rank"] is None:
                query = self["self_attn.q_proj"] @ row
            else:
                low = self.norm(self["self_attn.q_a_proj"] @ row, "self_attn.q_a_layernorm")
                query = self["self_attn.q_b_proj"] @ low
            seen = range(position + 1)
            if "index_topk" in config:
                seen = self.chosen(row, low, position, index_keys)
            by_head = []
            for head, q in enumerate(query.view(heads, nope + rope)):
                q_rotated = self.turned(q[nope:], position)
                scores = [(up[head, :nope] @ latents[i] @ q[:nope] + rotated[i] @ q_rotated) * scale for i in seen]
                weights = torch.stack(scores).softmax(0)
                values = torch.stack([up[head, nope:] @ latents[i] for i in seen])
                by_head.append(weights @ values)
            out.append(self["self_attn.o_proj"] @ torch.cat(by_head))
        return torch.stack(out)

    def chosen(self, row: torch.Tensor, low: torch.Tensor, position: int, keys: list[torch.Tensor]) -> list[int]:
        heads, size = self.config["index_n_heads"], self.config["index_head_dim"]
        rope, bias = self.config["qk_rope_head_dim"], self.tensors[f"{BLOCK}self_attn.indexer.k_norm.bias"]

        def turned(x: torch.Tensor) -> torch.Tensor:
            return torch.cat((self.turned(x[:rope], position, halves=True), x[rope:]))

        key = self["self_attn.indexer.wk"] @ row
        key = (key - key.mean()) / (key.var(unbiased=False) + 1e-6).sqrt() * self["self_attn.indexer.k_norm"] + bias
        keys.append(turned(key))
        queries = [turned(q) for q in (self["self_attn.indexer.wq_b"] @ low).view(heads, size)]
        weights = self["self_attn.indexer.weights_proj"] @ row * heads**-0.5
        scores = [
            sum(float(w) * max(0.0, float(q @ k) * size**-0.5) for w, q in zip(weights, queries, strict=True))
            for k in keys
        ]
        return sorted(range(len(keys)), key=lambda i: -scores[i])[: self.config["index_topk"]]

    def experts(self, row: torch.Tensor) -> torch.Tensor:
        config, count = self.config, self.config["n_routed_experts"]
        scores = 1 / (1 + (-self["mlp.gate"] @ row).exp())
        biased = (scores + self.tensors[f"{BLOCK}mlp.gate.e_score_correction_bias"]).tolist()
        size = count // config["n_group"]
        groups = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(config["n_group"])]
        kept = sorted(range(len(groups)), key=lambda g: -groups[g])[: config["topk_group"]]
        candidates = [e for e in range(count) if e // size in kept]
        chosen = sorted(candidates, key=lambda e: -biased[e])[: config["num_experts_per_tok"]]
        total = sum(float(scores[e]) for e in chosen)
        out = self.gated(row, "mlp.shared_experts")
        for e in chosen:
            weight = float(scores[e]) / (total + 1e-20) * config["routed_scaling_factor"]
            out = out + weight * self.gated(row, f"mlp.experts.{e}")
        return out

    def gated(self, row: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self[f"{name}.gate_proj"] @ row, self[f"{name}.up_proj"] @ row
        return self[f"{name}.down_proj"] @ (gate / (1 + (-gate).exp()) * up)
