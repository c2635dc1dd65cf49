"""Every engine option and its default, once. Frozen; unknown keys are refused with the nearest right name. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError, model_validator


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """A sentence naming the closest allowed spelling, or all of them when nothing is close."""
    names = sorted(allowed)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f"did you mean {close[0]!r}?"
    return f"allowed: {', '.join(names)}"


class StrictModel(BaseModel):
    """A frozen pydantic model whose faults are one plain sentence each, raised as ValueError."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ValueError("; ".join(self._sentence(e) for e in error.errors())) from None

    @classmethod
    def _sentence(cls, error: Any) -> str:
        where = ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            return f"unknown option {where!r}: {did_you_mean(where, cls.model_fields)}"
        message = str(error["msg"]).removeprefix("Value error, ")
        if not where:
            return message
        message = re.sub(r"^Input should be", "must be", message)
        return f"{where} {message}, got {error['input']!r}"


def _token_count(value: Any) -> Any:
    """Read "32k" as 32,000 and "32K" as 32,768, as vLLM does."""
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", value.strip())):
        unit = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[found[2]]
        return int(float(found[1]) * unit)
    return value


TokenCount = Annotated[int, BeforeValidator(_token_count), Field(ge=1)]


class EngineConfig(StrictModel):
    """What an engine is made of. "auto" and None are answered once, when the engine is built; see `Engine.resolved`."""

    model: str = "smollm2"
    """A folder, a .gguf file, a hub id, or a short name (`rorqual models` lists them)."""
    tokenizer: str | None = None
    """A folder, a .gguf file or a hub id to take the tokenizer from. Default: the model's own."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts and answers are token ids."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hf_overrides: dict[str, Any] = {}
    """JSON object merged over the model's config.json."""
    trust_remote_code: bool = False
    """Accepted so that other engines' scripts run; Rorqual never runs code from a checkpoint."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """How to read weights; "dummy" makes seeded random ones at the config's full size."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and activations. auto: bfloat16 where the device computes in it natively or weights are
    integers, else float32."""
    quantization: Literal["auto", "none", "int8", "int4", "int8_weight_only", "int4_weight_only"] = "auto"
    """Integer weights, on the CPU. auto: as the checkpoint stores them, which for GGUF means packed as in the file (not
    with dtype float32), with products of 8-bit integers; none: GGUF becomes dtype; int8 and int4 round the matrices of
    an unquantised checkpoint at load; _weight_only leaves the inputs of products alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto: cuda if there is a usable one, else cpu."""
    activation_quantization: Literal["auto", "none"] = "auto"
    """Inputs of products with quantised weights. auto: rounded as the checkpoint's activation_scheme says, or to
    integers beside integer weights; none: left as they are."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"] = "auto"
    """Dtype of the KV cache. auto: the dtype of the activations; fp8 (or fp8_e4m3): a byte per value, no scales, or
    DeepSeek-V4's records of FP8 and bfloat16."""
    index_cache_dtype: Literal["auto", "fp8", "fp4"] = "auto"
    """What an indexer keeps its keys in (DeepSeek-V3.2 and V4). auto: plain numbers, as the KV cache's; fp8 and fp4:
    behind a Hadamard transform, with scales, and its queries are rounded alike."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share every layer, one GPU each, or a part of the CPU's cores."""
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Replicas that each schedule their own sequences."""
    data_parallel_rank: Annotated[int, Field(ge=0)] | None = None
    """Which of them this is, where each is started by itself and exchanges tokens with the others."""
    enable_expert_parallel: bool = False
    """Every rank holds some whole routed experts, instead of a part of each."""
    enable_eplb: bool = False
    """Move experts between ranks as tokens want them; with enable_expert_parallel."""
    num_redundant_experts: Annotated[int, Field(ge=0)] = 0
    """Places of each layer for second copies of the experts that most tokens want, so that replicas share them; with
    enable_eplb, and rounded up until all ranks have as many."""
    eplb_window_size: Annotated[int, Field(ge=1)] = 100
    """Last steps whose tokens say where experts move."""
    eplb_step_interval: Annotated[int, Field(ge=1)] = 3000
    """Steps from one move to the next; the first comes after a quarter of them."""
    distributed_executor_backend: Literal["mp", "torchrun"] = "mp"
    """Who starts the ranks: mp, this program, on one host or, with nnodes, on each; torchrun, which has started this
    program once for each of them."""
    nnodes: Annotated[int, Field(ge=1)] = 1
    """Hosts that share the ranks evenly; the same command runs on each, but for node_rank."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """This host's number; people talk to host 0."""
    master_addr: str | None = None
    """Host 0's address, as the others reach it."""
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """A free port of host 0. Default on one host: one that the system chooses."""
    rank_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds without a sign of life after which a rank counts as dead, and the engine ends."""
    check_ranks: bool = False
    """Compare what the ranks are about to compute before every step, to find a rank that disagrees."""
    max_model_len: TokenCount | None = None
    """Longest prompt plus output, in tokens. Default: the model's own, cut (and said so) to what the KV cache holds."""
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    """Sequences that run at once; more of them wait. Default: 256, or max_num_batched_tokens if that is less."""
    max_num_batched_tokens: TokenCount | None = None
    """Tokens computed per step. Default: 1024 on CPU, 8192 on GPU, and never below max_num_seqs."""
    long_prefill_token_threshold: TokenCount | None = None
    """Most prompt tokens of one sequence per step. Default: all that is left, or half while other prompts wait."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens per KV block."""
    enable_prefix_caching: bool = True
    """Reuse the KV of equal prompt prefixes."""
    kv_cache_memory: ByteSize | None = None
    """Bytes for the KV cache, e.g. 4GiB. Default on CPU: half of what is free, at most 4 GiB; on GPU: see
    gpu_memory_utilization."""
    num_kv_blocks: Annotated[int, Field(ge=1)] | None = None
    """KV blocks of block_size tokens, in each cache group that keeps all tokens; others get what they need of as many.
    Overrides kv_cache_memory."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that this engine may fill: the KV cache gets what weights and the largest step leave of
    it, or of what other processes leave if that is less. Not used on CPU: see kv_cache_memory."""
    enforce_eager: bool = False
    """Never use CUDA graphs. On CPU nothing is captured anyway."""
    async_scheduling: bool = True
    """On a GPU, start a decode step while the tokens of the one before are still on the device; steps that need them
    on the host (bad_words of several tokens) wait. On CPU nothing changes."""
    seed: int | None = None
    """Makes requests without their own seed repeatable, by order of arrival. Default: different every time."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads. Default: the cores this process may use."""
    chat_template: str | None = None
    """A file with a Jinja chat template. Default: the model's own."""
    generation_config: str = "auto"
    """Source of default sampling options: "auto" (the model's generation_config.json), "vllm" (none), or a folder."""
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    """Most logprobs or prompt_logprobs that a request may ask for."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:  # every running sequence decodes each step
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}): "
                "raise the first or lower the second"
            )
        if self.data_parallel_rank is not None and self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank goes from 0 to {self.data_parallel_size - 1} with data_parallel_size "
                f"{self.data_parallel_size}, got {self.data_parallel_rank}"
            )
        world = self.tensor_parallel_size * self.data_parallel_size
        if world % self.nnodes:
            raise ValueError(
                f"{world} ranks (tensor_parallel_size times data_parallel_size) do not go into {self.nnodes} hosts "
                "evenly: use a number of nnodes that divides them"
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank goes from 0 to {self.nnodes - 1} with nnodes {self.nnodes}, got {self.node_rank}"
            )
        if self.enable_eplb and (world == 1 or not self.enable_expert_parallel):
            raise ValueError(
                "enable_eplb moves whole experts between ranks: it needs enable_expert_parallel and more than one rank "
                "(tensor_parallel_size, data_parallel_size)"
            )
        if self.enable_eplb and self.num_redundant_experts and self.data_parallel_size == 1:
            raise ValueError(
                "num_redundant_experts are copies that replicas share out among them, and data_parallel_size is 1: "
                "leave them out, or use more replicas"
            )
        if self.eplb_window_size > self.eplb_step_interval:
            raise ValueError(
                f"eplb_window_size must be 1 to {self.eplb_step_interval} steps, the eplb_step_interval, got "
                f"{self.eplb_window_size}: choose a shorter window or a longer interval"
            )
        by_hand = self.nnodes > 1 and self.distributed_executor_backend == "mp"
        if by_hand and (self.master_addr is None or self.master_port is None):
            raise ValueError("several hosts need master_addr and master_port: host 0's address and a free port of it")
        return self
