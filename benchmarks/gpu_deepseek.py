"""DeepSeek's models on a GPU: layers of published widths with made-up weights, each op beside its floor.

    python benchmarks/gpu_deepseek.py [--models v4-flash-csa ...] [--parts layers ...] [--out benchmarks/results]

Every model of a part runs in a process of its own, and its result is merged into cuda_deepseek.json in the folder, so
that parts may run one by one; the tables are made of what the file then holds.

    layers   the ops of a decode step, for batches of 1, 32 and 128 after 4k, 32k and 128k tokens: a layer's sum beside
             the sum of the ops' floors
    experts  the mixture of a Qwen3-30B-A3B layer for batches of 1 to 256: bytes of the experts hit over the time
    engine   DeepSeek-V4-Flash cut to the layers that one GPU holds: tokens/s of 1, 32 and 128 sequences, beside the
             bytes of a step
    memory   bytes of cache per token after a million tokens; no GPU is asked
    report   nothing is run: the tables alone

A floor is the larger of bytes over a copy's rate and operations over a bfloat16 product's, both measured in the same
process; op_work.py says what is counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu_engine import MODELS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NAME = "cuda_deepseek"

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": _FP8,
}
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "quantization_config": _FP8 | {"scale_fmt": "ue8m0"},
}
V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_act": "silu",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_hash_layers": 3,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "quantization_config": _FP8 | {"scale_fmt": "ue8m0"},
}


def _only(ratio: int) -> dict[str, Any]:
    """V4-Flash with layers of one kind, none of them with hashed routing."""
    return V4_FLASH | {"compress_ratios": [ratio] * 43 + [0], "num_hash_layers": 0}


LAYERS = {
    "v3": V3 | {"first_k_dense_replace": 0},
    "v32": V32 | {"first_k_dense_replace": 0},
    "v4-flash-csa": _only(4),
    "v4-flash-hca": _only(128),
    "v4-flash-window": _only(0),
}
BATCHES = (1, 32, 128)
CONTEXTS = (4096, 32768, 131072)
MOE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PARTS = ("layers", "experts", "engine", "memory")
ENGINE_LAYERS = 34
"""Of V4-Flash's 43: 3.6 GB each, beside 1.1 GB of embedding and head and the cache."""
BLOCK_SIZE = 64


# ---- running ---------------------------------------------------------------------------------------------------------


def time_layers(folder: Path, shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """The ops of decode steps of (sequences, context), in this process."""
    from rorqual.cli.bench_report import measured_limits
    from rorqual.cli.collect_env import environment
    from rorqual.config import EngineConfig
    from rorqual.engine.layer_bench import LayerBench, StepShape

    steps = [StepShape(batch, 1, context) for batch, context in shapes]
    options = {"model": str(folder), "dtype": "bfloat16", "block_size": BLOCK_SIZE}
    bench = LayerBench(EngineConfig(**options), steps)
    limits = measured_limits(bench.resolved)
    rows = []
    for step in steps:
        ops = []
        for timing in bench.time_step(step):
            if timing.role != "part" or (timing.num_calls == 1 and bench.used_layers > 1):
                continue
            floor = limits.seconds(timing.work) * 1e6 if timing.work else None
            ops.append(
                {
                    "op": timing.op,
                    "backend": timing.backend,
                    "shapes": timing.shapes,
                    "per_layer": timing.num_calls / bench.used_layers,
                    "us": timing.us,
                    "floor_us": floor,
                    "in_graph": timing.in_graph,
                    "num_bytes": timing.work.num_bytes if timing.work else None,
                }
            )
        rows.append({"batch": step.num_seqs, "context": step.context, "ops": ops})
        total = sum(op["us"] * op["per_layer"] for op in ops)
        least = sum((op["floor_us"] or 0) * op["per_layer"] for op in ops)
        print(f"{step.num_seqs} x {step.context}: {total:.0f} us, floor {least:.0f} us", file=sys.stderr, flush=True)
    return {"rows": rows, "limits": limits._asdict(), "layers": bench.used_layers, "environment": environment()}


def time_engine(folder: Path) -> dict[str, Any]:
    """Steady decode steps of the whole engine, in this process."""
    from rorqual import LLM, SamplingParams
    from rorqual.cli.bench_steady import seconds_per_step
    from rorqual.cli.collect_env import environment
    from rorqual.engine.device_timing import measure_limits
    from rorqual.engine.roofline import model_cost

    rows = []
    config = json.loads((folder / "config.json").read_text())
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "block_size": BLOCK_SIZE}
    with LLM(str(folder), max_model_len=8192, max_num_seqs=128, progress=False, **options) as llm:
        engine = llm.engine
        limits = measure_limits(engine.resolved.device, engine.resolved.dtype)
        cost = model_cost(config, engine.resolved)
        for batch in BATCHES:
            params = SamplingParams(temperature=0.6, seed=1, max_tokens=600, ignore_eos=True)
            ids = [
                engine.add_request([(7 * i + 11 * j) % 100_000 + 2 for j in range(1024)], params) for i in range(batch)
            ]
            while engine.scheduler.num_prompts:
                engine.step()
            times = [seconds_per_step(engine, 20) for _ in range(4)][1:]
            (kind,) = cost.experts
            hit = experts_hit(engine)
            extra = kind.num_layers * kind.bytes_per_expert * (hit - kind.expected_experts(batch))
            work = cost.decode_step([1100] * batch)
            work = work._replace(num_bytes=work.num_bytes + extra)
            rows.append(
                {
                    "batch": batch,
                    "context": 1100,
                    "experts_hit": hit,
                    "step_s": sorted(times)[1],
                    "num_bytes": work.num_bytes,
                    "floor_s": limits.seconds(work),
                }
            )
            for request in ids:
                engine.abort(request)
            while engine.has_work:
                engine.step()
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": rows, "limits": limits._asdict(), "environment": environment()}


def experts_hit(engine: Any) -> float:
    """How many experts of a layer the running sequences' next tokens choose, on average, in steps without graphs."""
    from rorqual.ops.registry import around

    counts = []

    def on_call(op: Any, fn: Any, args: Any, options: Any) -> Any:
        if op.name == "fused_experts":
            counts.append(args[2].expert_ids.unique().numel())
        return fn(*args, **options)

    runner = engine._runner
    graphs, runner._graphs = runner._graphs, None
    with around(on_call):
        for _ in range(3):
            engine.step()
    runner._graphs = graphs
    return sum(counts) / len(counts)


def cache_bytes(config: dict[str, Any], num_tokens: int) -> dict[str, float]:
    """What a sequence of so many tokens keeps, in bytes, by what it is."""
    import torch

    from rorqual.cache.spec import group_caches
    from rorqual.distributed.mesh import Mesh
    from rorqual.layers.decoder import Placement
    from rorqual.models.registry import build_model

    place = Placement(Mesh.single(), torch.bfloat16, torch.device("meta"), torch.bfloat16, 1)
    growing = fixed = 0.0
    for spec, caches in group_caches(build_model(config, place).kv_specs):
        row_bytes = spec.bytes_per_row() * len(caches)
        if spec.retention is None:
            growing += row_bytes * (num_tokens // spec.tokens_per_row)
        else:
            fixed += row_bytes * (spec.retention.back + spec.retention.period)
    return {"growing": growing, "fixed": fixed, "per_token": (growing + fixed) / num_tokens}


def run_in_process(model: str, part: str, folder: Path) -> dict[str, Any]:
    """What one process measures."""
    if part == "layers":
        return time_layers(folder, [(batch, context) for context in CONTEXTS for batch in BATCHES])
    if part == "experts":
        return time_layers(folder, [(batch, 256) for batch in MOE_BATCHES])
    return time_engine(folder)


CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "layers": LAYERS,
    "experts": {"qwen3-30b-a3b": MODELS["qwen3-30b-a3b"]},
    "engine": {
        "v4-flash-cut": V4_FLASH
        | {
            "num_hidden_layers": ENGINE_LAYERS,
            "compress_ratios": [*V4_FLASH["compress_ratios"][:ENGINE_LAYERS], 0],
        }
    },
}


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """A result with what matters of its environment."""
    facts = result.pop("environment")
    about = {"date": facts["date"], "commit": facts["commit"], "gpus": facts["machine"]["gpus"]}
    return result | {"about": about | {name: facts["versions"][name] for name in ("python", "torch", "triton")}}


# ---- reporting -------------------------------------------------------------------------------------------------------


def report(found: dict[str, Any]) -> str:
    """The tables, as Markdown."""
    lines = ["# DeepSeek's models on a GPU", ""]
    abouts = [result["about"] for part in found.values() for result in part.values() if "about" in result]
    for about in {json.dumps(about | {"date": about["date"][:10]}): about for about in abouts}.values():
        lines.append(
            f"- {', '.join(about['gpus']) or 'no GPU'}; python {about['python']}, torch {about['torch']}, triton "
            f"{about['triton']}; {about['date'][:10]}, commit {about['commit'] or 'not recorded'}"
        )
    lines += ["- command: `python benchmarks/gpu_deepseek.py`; what is measured stands at the top of that file", ""]
    for model, result in found.get("layers", {}).items():
        lines += layer_tables(model, result)
    for model, result in found.get("experts", {}).items():
        lines += expert_table(model, result)
    for model, result in found.get("engine", {}).items():
        lines += engine_table(model, result)
    if "memory" in found:
        lines += memory_table(found["memory"])
    return "\n".join(lines)


def layer_tables(model: str, result: dict[str, Any]) -> list[str]:
    lines = [f"## A layer of {model}, decoding", ""]
    lines += ["| sequences | tokens before | us | floors | times the floors |", "|---" * 5 + "|"]
    for row in result["rows"]:
        total = sum(op["us"] * op["per_layer"] for op in row["ops"])
        least = sum((op["floor_us"] or 0.0) * op["per_layer"] for op in row["ops"])
        lines.append(f"| {row['batch']} | {row['context']:,} | {total:,.0f} | {least:,.0f} | {total / least:.2f} |")
    for row in result["rows"]:
        if row["batch"] == max(BATCHES):
            lines += ["", f"{row['batch']} sequences after {row['context']:,} tokens:", ""]
            lines += ["| op | backend | a layer | us | floor | of it |", "|---" * 6 + "|"]
            for op in sorted(row["ops"], key=lambda op: -op["us"] * op["per_layer"]):
                floor, share = ("", "") if op["floor_us"] is None else (
                    f"{op['floor_us']:.1f}", f"{op['floor_us'] / op['us']:.0%}"
                )  # fmt: skip
                lines.append(
                    f"| {op['op']} {op['shapes']} | {op['backend']} | {op['per_layer']:g} | {op['us']:.1f} | {floor} | "
                    f"{share} |"
                )
    return [*lines, ""]


def expert_table(model: str, result: dict[str, Any]) -> list[str]:
    lines = [
        f"## Experts of a {model} layer",
        "",
        "| tokens | us | MB of experts hit | of a copy's rate |",
        "|---" * 4 + "|",
    ]
    for row in result["rows"]:
        for op in row["ops"]:
            if op["op"] == "fused_experts":
                rate = op["num_bytes"] / op["us"] / 1e-6 / result["limits"]["bytes_per_s"]
                lines.append(f"| {row['batch']} | {op['us']:.1f} | {op['num_bytes'] / 1e6:.1f} | {rate:.0%} |")
    return [*lines, ""]


def engine_table(model: str, result: dict[str, Any]) -> list[str]:
    lines = [
        f"## {model}: {ENGINE_LAYERS} of 43 layers",
        "",
        "Bytes are counted with the experts that the made-up routers chose, of 256 a layer.",
        "",
        "| sequences | ms a step | tok/s | experts hit a layer | GB a step | of the floor |",
        "|---" * 6 + "|",
    ]
    for row in result["rows"]:
        step = row["step_s"]
        lines.append(
            f"| {row['batch']} | {1e3 * step:.2f} | {row['batch'] / step:,.0f} | {row['experts_hit']:.0f} | "
            f"{row['num_bytes'] / 1e9:.1f} | "
            f"{row['floor_s'] / step:.0%} |"
        )
    return [*lines, ""]


def memory_table(found: dict[str, Any]) -> list[str]:
    lines = ["## Cache of a sequence of 1,048,576 tokens, bfloat16", ""]
    lines += ["| | grows, GB | fixed, MB | bytes per token | of v3 |", "|---" * 5 + "|"]
    for model, sizes in found.items():
        share = sizes["per_token"] / found["v3"]["per_token"]
        lines.append(
            f"| {model} | {sizes['growing'] / 1e9:.2f} | {sizes['fixed'] / 1e6:.1f} | {sizes['per_token']:,.0f} | "
            f"{share:.1%} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="of the parts that run; default: all")
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "report"), default=PARTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--inside", nargs=3, metavar=("MODEL", "PART", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        model, part, folder = options.inside
        result = run_in_process(model, part, Path(folder))
        (Path(folder) / "result.json").write_text(json.dumps(result))
        return
    path = options.out / f"{NAME}.json"
    source = path if path.exists() else RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(source.read_text()) if source.exists() else {}
    for part in options.parts:
        if part == "memory":
            configs = {"v3": V3, "v32": V32, "v4-flash": V4_FLASH}
            found[part] = {model: cache_bytes(config, 1 << 20) for model, config in configs.items()}
        for model, config in CONFIGS.get(part, {}).items():
            if options.models and model not in options.models:
                continue
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(config))
                started = time.perf_counter()
                command = [sys.executable, __file__, "--inside", model, part, folder]
                if subprocess.run(command, check=False, cwd=ROOT).returncode:
                    print(f"{model} {part} failed", file=sys.stderr, flush=True)
                    continue
                result = kept(json.loads((Path(folder) / "result.json").read_text()))
                print(f"{model} {part}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            found.setdefault(part, {})[model] = result
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
    text = report(found)
    (options.out / f"{NAME}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
