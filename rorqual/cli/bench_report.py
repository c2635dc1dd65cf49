"""What a benchmark found: beside its floor, as a table, and as JSON with the machine it ran on. No torch at import."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rorqual.cli.bench_workload import Workload
from rorqual.cli.collect_env import environment
from rorqual.config import EngineConfig

if TYPE_CHECKING:
    from rorqual.engine.resolved_config import ResolvedConfig
    from rorqual.engine.roofline import Floor, Limits, ModelCost
    from rorqual.llm import LLM


def measured_limits(resolved: ResolvedConfig) -> Limits:
    """What an engine's device reaches in a plain copy and a plain product, measured now."""
    from rorqual.engine.device_timing import measure_limits
    from rorqual.loader.integer_quantization import IntegerQuantization

    held = resolved.quantization
    dynamic = isinstance(held, IntegerQuantization) and held.dynamic
    return measure_limits(resolved.device, resolved.dtype, integer_products=dynamic)


def counted_cost(llm: LLM, config: EngineConfig) -> ModelCost:
    """The engine's model, counted from its config."""
    from rorqual.engine.roofline import model_cost
    from rorqual.loader.checkpoint import open_checkpoint

    hf_config = open_checkpoint(llm.engine.path, load_format=config.load_format).config
    return model_cost({**hf_config, **config.hf_overrides}, llm.engine.resolved)


def floor_of(llm: LLM, config: EngineConfig, load: Workload) -> dict[str, Any]:
    """The least time for a workload on this device, and what it is made of."""
    from rorqual.engine.roofline import workload_floor

    resolved = llm.engine.resolved
    limits = measured_limits(resolved)
    floor = workload_floor(
        counted_cost(llm, config),
        limits,
        [len(ids) for ids in load.prompts],
        load.output_lens,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
    )
    return _as_json(floor, limits)


def _as_json(floor: Floor, limits: Limits) -> dict[str, Any]:
    return {
        "total_s": floor.total_s,
        "prefill": floor.prefill._asdict() | {"s": floor.prefill_s},
        "decode": floor.decode._asdict() | {"s": floor.decode_s, "num_steps": floor.num_decode_steps},
        "limits": limits._asdict(),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people: rates, the floor, then where the time of the steps went."""
    total, steps, floor = result["total_s"], max(1, result["num_steps"]), result["floor"]
    least, reached = floor["total_s"], floor["total_s"] / total
    outputs, prompts = result["output_tokens"], result["prompt_tokens"]
    lines = [
        f"requests      {result['num_requests']}",
        f"total time    {total:.3f} s{_of_rounds(result['rounds_s'])}",
        f"prompt        {prompts} tokens, {result['prompt_tokens_per_s']:.1f} tok/s",
        f"output        {outputs} tokens, {result['output_tokens_per_s']:.1f} tok/s",
        f"per output    {1e3 * total / outputs:.3f} ms, all in all",
        f"first token   {result['first_token_ms']:.2f} ms, the median request",
    ]
    if result["between_tokens_ms"] is not None:
        lines.append(f"then          {result['between_tokens_ms']:.3f} ms from token to token, the median request")
    lines.append(f"steps         {result['num_steps']}, {result['mean_tokens_per_step']:.1f} tokens each on average")
    if result["cached_tokens"]:
        lines.append(f"cached        {result['cached_tokens']} prompt tokens, which the floor counts as computed")
    lines += [
        "",
        f"floor         {least:.3f} s: {prompts / least:.1f} prompt tok/s, {outputs / least:.1f} output tok/s, "
        f"{1e3 * least / outputs:.3f} ms per output",
        f"reached       {100 * reached:.1f}% of it",
        *(f"  {part:<11} {_part(floor[part])}" for part in ("prefill", "decode")),
        f"  this device {reaches(floor['limits'])}",
        "",
        f"{'stage':<12} {'seconds':>9} {'ms/step':>9} {'share':>7}",
    ]
    for stage, seconds in result["stage_s"].items():
        lines.append(f"{stage:<12} {seconds:>9.3f} {1000 * seconds / steps:>9.3f} {100 * seconds / total:>6.1f}%")
    return "\n".join(lines)


def reaches(limits: Mapping[str, float]) -> str:
    """The limits of a device, for people."""
    return (
        f"reaches {limits['bytes_per_s'] / 1e9:.1f} GB/s in a copy and {limits['flops_per_s'] / 1e12:.2f} TFLOP/s in a "
        "product, measured now"
    )


def _part(part: Mapping[str, float]) -> str:
    steps = f" in {part['num_steps']} steps" if "num_steps" in part else ""
    return f"{part['s']:.3f} s: {part['num_bytes'] / 1e9:.1f} GB, {part['flops'] / 1e12:.2f} TFLOP{steps}"


def _of_rounds(seconds: list[float]) -> str:
    if len(seconds) == 1:
        return ""
    return f", the median of {', '.join(f'{each:.3f}' for each in sorted(seconds))}"


def used_options(own: Mapping[str, Any], config: EngineConfig, llm: LLM, seed: int) -> dict[str, Any]:
    """Every option as it was in force, defaults and answers to "auto" included."""
    return {
        "command": sys.argv,
        "bench": dict(own),
        "engine": config.model_dump() | {"seed": seed},
        "banner": llm.engine.banner(),
    }


def write_json(path: str, benchmark: str, result: Mapping[str, Any]) -> None:
    """Write a result, its environment added. Raises ValueError where that is not possible."""
    target = Path(path).expanduser()
    text = json.dumps({"benchmark": benchmark, **result, "environment": environment()}, indent=2)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")
    except OSError as error:
        raise ValueError(f"cannot write --json-out {path}: {error}") from None
