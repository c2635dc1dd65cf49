"""`rorqual plan MODEL --gpus N`: how N GPUs can share a model, what each way holds, and how fast it may be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ByteSize, Field

from rorqual.cli.command import Command
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig, StrictModel, TokenCount

if TYPE_CHECKING:
    from rorqual.engine.gpu_facts import GpuFacts
    from rorqual.engine.topology import DecodeStep, Topology, TopologyPlan
    from rorqual.engine.topology_plan import Planner

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


class PlanOptions(StrictModel):
    """What `rorqual plan` itself takes."""

    gpus: Count | None = None
    """GPUs in all. Default: as many as the topology needs that is asked for, else one."""
    gpu: str = "h200"
    """What they are: a100, h100, h800, h20, h200, l40s or b200."""
    gpus_per_host: Count = 8
    """GPUs of one host; between hosts is the network."""
    batch: tuple[Count, ...] = ()
    """Sequences that decode at once, in all; several with commas. Default: 1, 32 for each GPU and 128 for each GPU."""
    context: TokenCount = 4096
    """Tokens that each of them has so far."""
    exchange: Literal["buffers", "rows"] | None = None
    """What replicas that share experts send in a decode step: whole buffers to every rank, or only the rows that a rank
    has experts for. Default: buffers within a host, rows beyond, as the engine does."""
    gpu_memory: ByteSize | None = None
    """A GPU's memory, e.g. 80GiB. Default: the GPU's."""
    hbm_rate: Rate | None = None
    """GB/s that are read from it. Default: what this GPU reaches, not what its data sheet says; so are the others."""
    bf16_rate: Rate | None = None
    """TFLOP/s of bfloat16 products."""
    fp8_rate: Rate | None = None
    """TFLOP/s of FP8 products."""
    link_rate: Rate | None = None
    """GB/s to GPUs of the same host, one way."""
    network_rate: Rate | None = None
    """GB/s of one GPU to other hosts, one way."""
    link_latency: Rate | None = None
    """Microseconds that an exchange within a host takes at least. Default: 10."""
    network_latency: Rate | None = None
    """Microseconds that one between hosts takes at least. Default: 25."""
    json_: bool = False
    """Print one JSON object instead of tables."""

    def facts(self) -> GpuFacts:
        """The GPU, with the numbers that were given."""
        from rorqual.engine.gpu_facts import gpu_facts

        def scaled(value: float | None, unit: float) -> float | None:
            return None if value is None else value * unit

        return gpu_facts(
            self.gpu,
            memory_bytes=None if self.gpu_memory is None else int(self.gpu_memory),
            bytes_per_s=scaled(self.hbm_rate, 1e9),
            bf16_flops_per_s=scaled(self.bf16_rate, 1e12),
            fp8_flops_per_s=scaled(self.fp8_rate, 1e12),
            link_bytes_per_s=scaled(self.link_rate, 1e9),
            network_bytes_per_s=scaled(self.network_rate, 1e9),
            link_latency_s=scaled(self.link_latency, 1e-6),
            network_latency_s=scaled(self.network_latency, 1e-6),
        )


def run(settings: Settings) -> int:
    """Count the topologies and print them, the fastest first."""
    options = settings.build(PlanOptions)
    if settings.positionals:
        settings.set(EngineConfig, "model", settings.positionals[0], origin="MODEL")
    config = settings.build(EngineConfig)
    gpu, given = options.facts(), settings.values(EngineConfig)
    num_gpus = options.gpus or config.tensor_parallel_size * config.data_parallel_size

    from rorqual.engine.topology import Hosts, ranked, sensible_topologies
    from rorqual.engine.topology_plan import Planner, resolve_for_gpu
    from rorqual.loader.checkpoint import open_checkpoint
    from rorqual.loader.source import resolve_model

    hosts = Hosts(num_gpus, options.gpus_per_host)
    hosts.check()
    # Weights are not read, so that a folder with a config alone will do.
    checkpoint = open_checkpoint(resolve_model(config.model, revision=config.revision), load_format="dummy")
    hf_config = {**checkpoint.config, **config.hf_overrides}
    resolved = resolve_for_gpu(config, hf_config, checkpoint.integer_formats)
    planner = Planner(
        hf_config,
        resolved,
        gpu,
        hosts,
        utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        num_redundant_experts=config.num_redundant_experts,
        exchange=options.exchange,
    )
    if options.context > resolved.max_model_len:
        raise ValueError(
            f"{settings.origin(PlanOptions, 'context')} {options.context} is more than the {resolved.max_model_len} "
            "tokens of the model"
        )
    batches = sorted(set(options.batch)) or sorted({1, 32 * num_gpus, 128 * num_gpus})
    asked = _asked(config, given, num_gpus)
    refused: dict[str, str] = {}
    if asked is not None:
        plans = [planner.plan(asked, batches, options.context)]
    else:
        found = sensible_topologies(
            num_gpus,
            options.gpus_per_host,
            has_experts=planner.has_experts,
            expert_parallel=config.enable_expert_parallel if "enable_expert_parallel" in given else None,
        )
        plans, refused = _counted(planner, found, batches, options.context)
        plans = ranked(plans)
    if options.json_:
        print(json.dumps(_as_json(config, num_gpus, gpu, plans, refused), indent=2))
    else:
        print(_text(config, num_gpus, gpu, plans, refused))
    return 0


def _asked(config: EngineConfig, given: dict[str, Any], num_gpus: int) -> Topology | None:
    """The topology that the options name; None where they leave it open."""
    from rorqual.engine.topology import Topology

    tp_size, dp_size = config.tensor_parallel_size, config.data_parallel_size
    if not {"tensor_parallel_size", "data_parallel_size"} & given.keys():
        return None
    if "data_parallel_size" not in given and num_gpus % tp_size == 0:
        dp_size = num_gpus // tp_size
    elif "tensor_parallel_size" not in given and num_gpus % dp_size == 0:
        tp_size = num_gpus // dp_size
    if tp_size * dp_size != num_gpus:
        raise ValueError(
            f"tensor_parallel_size {tp_size} times data_parallel_size {dp_size} is not the {num_gpus} of --gpus: use "
            "numbers whose product it is, or leave one of the three out"
        )
    return Topology(tp_size, dp_size, config.enable_expert_parallel)


def _counted(
    planner: Planner, found: list[Topology], batches: list[int], context: int
) -> tuple[list[TopologyPlan], dict[str, str]]:
    """The plans of those that are possible, and why the others are not. Raises ValueError where none is."""
    plans, refused = [], {}
    for topology in found:
        try:
            plans.append(planner.plan(topology, batches, context))
        except ValueError as error:
            refused[str(topology)] = str(error)
    if not plans:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ValueError(f"there is no way to share the model: {reasons}")
    return plans, refused


def _as_json(
    config: EngineConfig, num_gpus: int, gpu: GpuFacts, plans: list[TopologyPlan], refused: dict[str, str]
) -> dict[str, Any]:
    return {
        "model": config.model,
        "gpus": num_gpus,
        "gpu": {name: getattr(gpu, name) for name in gpu.__slots__},
        "topologies": [
            {
                "name": str(plan.topology),
                **plan.topology._asdict(),
                "memory": plan.memory._asdict(),
                "kv_cache": plan.cache._asdict() | {"tokens_in_all": plan.cache.tokens * plan.topology.dp_size},
                "decode": [_step_as_json(step, num_gpus) for step in plan.steps],
            }
            for plan in plans
        ],
        "refused": refused,
    }


def _step_as_json(step: DecodeStep, num_gpus: int) -> dict[str, Any]:
    return step._asdict() | {
        "all_reduce": step.all_reduce._asdict(),
        "all_to_all": step.all_to_all._asdict(),
        "overhead_s": step.overhead_s,
        "roofline_s": step.roofline_s,
        "expected_s": step.expected_s,
        "tokens_per_s": step.tokens_per_s,
        "tokens_per_s_each": step.tokens_per_s / step.running,
        "tokens_per_s_per_gpu": step.tokens_per_s / num_gpus,
        "roofline_tokens_per_s": step.running / step.roofline_s,
        "bound": step.bound,
    }


def _text(
    config: EngineConfig, num_gpus: int, gpu: GpuFacts, plans: list[TopologyPlan], refused: dict[str, str]
) -> str:
    """What was counted from, the topologies in one line each, and then each by itself."""
    context = plans[0].steps[0].context
    lines = [
        f"{config.model} on {num_gpus} x {gpu.name}, decoding after {context:,} tokens",
        f"a GPU reaches {gpu.bytes_per_s / 1e12:.2f} TB/s of {gpu.memory_bytes / 2**30:.1f} GiB, "
        f"{gpu.bf16_flops_per_s / 1e12:,.0f} TFLOP/s in bfloat16, {gpu.fp8_flops_per_s / 1e12:,.0f} in FP8, "
        f"{gpu.link_bytes_per_s / 1e9:,.0f} GB/s in a host, {gpu.network_bytes_per_s / 1e9:,.0f} GB/s between hosts",
        "",
    ]
    if len(plans) > 1:
        lines += [*_ranking(plans), ""]
    for plan in plans:
        lines += [*_details(plan, num_gpus), ""]
    lines += [f"not {name}: {why}" for name, why in refused.items()]
    return "\n".join(lines).rstrip()


def _ranking(plans: list[TopologyPlan]) -> list[str]:
    names = [f"tok/s at {step.batch:,}" for step in plans[0].steps]
    head = f"{'':<14} {'weights':>9} {'KV cache':>9} {'KV tokens':>12}"
    lines = [head + "".join(f"{name:>18}" for name in names)]
    for plan in plans:
        memory = plan.memory
        weights = (memory.dense + memory.tables + memory.experts) / 2**30
        rates = "".join(f"{step.tokens_per_s:>18,.0f}" for step in plan.steps)
        lines.append(
            f"{plan.topology!s:<14} {weights:>5.1f} GiB {memory.kv_cache / 2**30:>5.1f} GiB "
            f"{plan.cache.tokens * plan.topology.dp_size:>12,}{rates}"
        )
    return lines


def _details(plan: TopologyPlan, num_gpus: int) -> list[str]:
    parts = ", ".join(
        f"{name.replace('_', ' ')} {num_bytes / 2**30:.1f}"
        for name, num_bytes in plan.memory._asdict().items()
        if name != "total" and num_bytes
    )
    cache, replicas = plan.cache, plan.topology.dp_size
    fixed = f", and {cache.bytes_per_sequence:,} a sequence" if cache.bytes_per_sequence else ""
    lines = [
        f"{plan.topology}",
        f"  memory of a rank: {plan.memory.total / 2**30:.1f} GiB: {parts}",
        f"  KV cache: {cache.bytes_per_token:,.0f} bytes a token and rank{fixed}; {cache.tokens:,} tokens a rank, "
        f"{cache.tokens * replicas:,} in all",
        f"  {'sequences':>9} {'running':>9} {'ms a step':>10} {'tok/s each':>11} {'in all':>11} {'per GPU':>9} "
        f"{'roofline':>11} {'all-reduce':>20} {'all-to-all':>20}  bound by",
    ]
    for step in plan.steps:
        rate, ideal = step.tokens_per_s, step.running / step.roofline_s
        exchanged = [
            f"{each.num_bytes / 1e6:,.1f} MB {each.seconds * 1e3:.3f} ms" if each.calls else "-"
            for each in (step.all_reduce, step.all_to_all)
        ]
        lines.append(
            f"  {step.batch:>9,} {step.running:>9,} {step.expected_s * 1e3:>10.2f} {rate / step.running:>11,.1f} "
            f"{rate:>11,.0f} {rate / num_gpus:>9,.0f} {ideal:>11,.0f} {exchanged[0]:>20} {exchanged[1]:>20}  "
            f"{step.bound}"
        )
    return lines


COMMAND = Command(
    words=("plan",),
    summary="how N GPUs can share a model, what fits and how fast",
    details="Count how N GPUs can share MODEL (default: that of --model): the memory of a rank, the tokens that its KV "
    "cache holds, and for a decode step the expected tokens/s, the bytes between GPUs and what bounds it. Without "
    "--tensor-parallel-size or --data-parallel-size all sensible topologies, the fastest first. Nothing is run and no "
    "weights are read: config.json is enough, and no GPU is needed.",
    models=(PlanOptions, EngineConfig),
    run=run,
    usage="[OPTIONS] [MODEL]",
    max_positionals=1,
)
