"""`rorqual bench kernels`: the ops of a decode step and of a prompt, each against what the machine could reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rorqual.cli.bench_report import measured_limits, reaches, write_json
from rorqual.cli.command import Command
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig, StrictModel

if TYPE_CHECKING:
    from rorqual.engine.layer_bench import OpTiming
    from rorqual.engine.roofline import Limits


class KernelsOptions(StrictModel):
    """What `rorqual bench kernels` itself takes."""

    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Sequences of the decode step. Default: 256 on a GPU, 16 on a CPU."""
    context_len: Annotated[int, Field(ge=1)] = 1024
    """Keys that each of them sees, itself included."""
    prompt_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens of each prompt in the prompt step. Default: 2048 on a GPU, 512 on a CPU."""
    num_prompts: Annotated[int, Field(ge=1)] | None = None
    """Prompts in it. Default: 4 on a GPU, 1 on a CPU."""
    json_out: str | None = None
    """Write the result there as JSON, with machine, versions, commit and options."""
    quiet: bool = False
    """No progress on standard error."""


_DEFAULTS = {
    "cuda": {"batch_size": 256, "prompt_len": 2048, "num_prompts": 4},
    "cpu": {"batch_size": 16, "prompt_len": 512, "num_prompts": 1},
}


def run(settings: Settings) -> int:
    """Time the ops and print them."""
    options = settings.build(KernelsOptions)
    config = settings.build(EngineConfig)

    from tqdm import tqdm

    from rorqual.engine.layer_bench import LayerBench, StepShape
    from rorqual.platform import describe_device, pick_device

    given = {name: value for name, value in options.model_dump().items() if value is not None}
    sizes = _DEFAULTS[pick_device(config.device).type] | given
    shapes = {
        "decode": StepShape(sizes["batch_size"], 1, options.context_len),
        "prompt": StepShape(sizes["num_prompts"], sizes["prompt_len"], sizes["prompt_len"]),
    }
    bench = LayerBench(config, list(shapes.values()), progress=not options.quiet)
    limits = measured_limits(bench.resolved)
    layers = {"used_layers": bench.used_layers, "num_layers": bench.num_layers}
    result: dict[str, Any] = {"limits": limits._asdict(), **layers, "steps": {}}
    print(
        f"{describe_device(bench.resolved.device)}, {str(bench.resolved.dtype).removeprefix('torch.')}; "
        f"{bench.used_layers} of {bench.num_layers} layers, weights made up\n"
        f"this device {reaches(result['limits'])}"
    )
    for name, shape in shapes.items():
        with tqdm(desc=f"Timing the {name} step", unit=" ops", disable=options.quiet) as bar:
            timings = bench.time_step(shape, on_op=bar.update)
        what = f"{shape.num_seqs} x {shape.length} tokens that see up to {shape.context} keys"
        print(f"\n{name} step: {what}\n{table(timings, limits, **layers)}")
        result["steps"][name] = {"shape": shape._asdict(), "ops": [_as_json(each, limits) for each in timings]}
    if options.json_out:
        used = {"bench": options.model_dump(), "engine": config.model_dump()}
        write_json(options.json_out, "kernels", result | {"options": used})
    return 0


def table(timings: list[OpTiming], limits: Limits, *, used_layers: int, num_layers: int) -> str:
    """One line for each op, then what the parts sum up to in the whole model."""
    head = f"{'us':>9} {'calls':>6} {'MB':>9} {'of copy':>8} {'GFLOP':>9} {'of product':>10} {'of floor':>8}  op"
    lines = [head]
    whole_us = floor_us = 0.0
    in_graphs = any(each.in_graph for each in timings)
    for each in timings:
        counted = each.work is not None
        facts = _as_json(each, limits)
        shown = [
            f"{each.work.num_bytes / 1e6:.2f}" if each.work else "-",
            f"{100 * facts['of_copy']:.0f}%" if counted else "-",
            f"{each.work.flops / 1e9:.2f}" if each.work and each.work.flops else "-",
            f"{100 * facts['of_product']:.0f}%" if each.work and each.work.flops else "-",
            f"{100 * facts['of_floor']:.0f}%" if counted else "-",
        ]
        columns = " ".join(f"{text:>{width}}" for text, width in zip(shown, (9, 8, 9, 10, 8), strict=True))
        once = each.num_calls == 1 and used_layers > 1
        calls = "once" if once else f"{each.num_calls / used_layers:.3g}"
        marks = {"part": "", "whole": ", with the ops it calls", "inner": ", within another op"}[each.role]
        marks += ", host included" if in_graphs and not each.in_graph else ""
        lines.append(f"{each.us:>9.2f} {calls:>6} {columns}  {each.op} ({each.backend}{marks}) {each.shapes}")
        if each.role == "part":
            times = 1 if once else num_layers * each.num_calls / used_layers
            whole_us += times * each.us
            floor_us += times * facts["floor_us"] if counted else 0.0
    lines.append(
        f"the model's {num_layers} layers and what is there once, by these: {whole_us / 1e3:.3f} ms; floor of what is "
        f"counted {floor_us / 1e3:.3f} ms ({100 * floor_us / max(whole_us, 1e-9):.0f}%)"
    )
    return "\n".join(lines)


def _as_json(timing: OpTiming, limits: Limits) -> dict[str, Any]:
    """A line as JSON values; fractions of the copy's and the product's rate, and of the floor, where it is counted."""
    facts: dict[str, Any] = timing._asdict() | {"work": timing.work._asdict() if timing.work else None}
    if timing.work is not None:
        floor_us = limits.seconds(timing.work) * 1e6
        facts |= {
            "floor_us": floor_us,
            "of_floor": floor_us / timing.us,
            "of_copy": timing.work.num_bytes / (timing.us * 1e-6) / limits.bytes_per_s,
            "of_product": timing.work.flops / (timing.us * 1e-6) / limits.flops_per_s,
        }
    return facts


COMMAND = Command(
    words=("bench", "kernels"),
    summary="the ops of a layer, against what the device could reach",
    details="Build some of the model's layers with made-up weights and time every op of a decode step and of a step "
    "that computes prompts, through the dispatch that an engine's calls take: on a GPU in a CUDA graph, on a CPU by "
    "the host's clock. Beside each stand its bytes and operations, as a part of what a copy and a product reach here. "
    "Small inputs, and those of what is called once, may lie in a cache, and so pass the copy.",
    models=(KernelsOptions, EngineConfig),
    run=run,
)
