"""The engines that cpu_vs_peers.py compares: how each one is given its model, and the process that runs it.

Nothing of Rorqual is imported but by its own class, so this file also runs under an interpreter that has only the
peers. Every engine gets token ids, decodes greedily, ignores EOS and has a cache for sixteen sequences.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DECODE_PROMPT, DECODE_NEW = 32, 128
PREFILL_PROMPT = 1024
BATCH, BATCH_PROMPT, BATCH_NEW = 16, (100, 500), 100
CONTEXT = 2048
"""Tokens of context that every engine is given."""
FIRST_TOKEN_IDS = [504, 4461, 15682, 314]
"""SmolLM2's ids of the prompt of "first token"; for another model it is some other prompt of that length."""
KV_BLOCKS = BATCH * (-(-(BATCH_PROMPT[1] + BATCH_NEW) // 16) + 1)
"""Blocks of sixteen tokens that hold the sixteen sequences."""


class Engine:
    """What a worker needs of an engine."""

    vocab_size: int
    build = ""
    """What the engine says of itself, where that decides its speed."""

    def __init__(self, model: str, threads: int) -> None:
        """Load the model; everything that it computes runs on so many threads."""
        raise NotImplementedError

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        """Generate `new` tokens; the time on perf_counter's clock at which each was there."""
        raise NotImplementedError

    def batch(self, prompts: list[list[int]], new: int) -> int:
        """Generate `new` tokens for every prompt, all submitted at once; returns how many came out."""
        raise NotImplementedError


class Rorqual(Engine):
    quantization = "auto"

    def __init__(self, model: str, threads: int) -> None:
        from rorqual import LLM, SamplingParams
        from rorqual.ops.native.library import kernels

        self.llm = LLM(
            model,
            progress=False,
            threads=threads,
            max_model_len=CONTEXT,
            quantization=self.quantization,
            num_kv_blocks=KV_BLOCKS,
        )
        self.params = SamplingParams(temperature=0, ignore_eos=True)
        self.vocab_size = self.llm.engine.vocab_size
        found = kernels()
        self.build = found.isa if found else "no compiled kernels"

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        deltas = self.llm.stream(prompt, self.params.clone(max_tokens=new))
        return [time.perf_counter() for delta in deltas for _ in delta.token_ids]

    def batch(self, prompts: list[list[int]], new: int) -> int:
        outputs = self.llm.generate(prompts, self.params.clone(max_tokens=new), use_tqdm=False)
        return sum(len(output.token_ids) for output in outputs)


class RorqualBF16(Rorqual):
    quantization = "none"


class Transformers(Engine):
    """In bfloat16; a batch is padded on the left."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.vocab_size = self.model.config.vocab_size

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        from transformers.generation.streamers import BaseStreamer

        times: list[float] = []

        class Clock(BaseStreamer):
            def put(self, value: Any) -> None:
                times.append(time.perf_counter())

            def end(self) -> None:
                pass

        self._generate([prompt], new, streamer=Clock())
        return times[1:]  # the first call hands over the prompt

    def batch(self, prompts: list[list[int]], new: int) -> int:
        made = self._generate(prompts, new)
        return int((made.shape[1] - max(map(len, prompts))) * made.shape[0])

    def _generate(self, prompts: list[list[int]], new: int, **options: Any) -> Any:
        import torch

        ids, mask = (torch.tensor(rows) for rows in padded(prompts, 0))
        with torch.inference_mode():
            return self.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


def padded(prompts: list[list[int]], pad: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of one length, filled up on the left, and 1 where a row has its own tokens."""
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(p)) + p for p in prompts]
    return rows, [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]


class LlamaCpp(Engine):
    """One llama_decode takes the tokens of all sequences, as the project's own server calls it."""

    def __init__(self, model: str, threads: int) -> None:
        from llama_cpp import llama_cpp as api

        self.api = api
        silence(api)
        api.llama_backend_init()
        self.build = ", ".join(re.findall(r"(\w+) = 1", api.llama_print_system_info().decode()))
        options = api.llama_model_default_params()
        # Its AMX kernels (0.3.36) end in SIGILL on some virtual machines, and repacked weights would lead there.
        options.use_extra_bufts = "AMX_INT8" not in self.build
        self.model = api.llama_model_load_from_file(model.encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not read {model}")
        self.one = self._context(1, CONTEXT, threads)
        self.many = self._context(BATCH, KV_BLOCKS * 16, threads)
        self.tokens = api.llama_batch_init(CONTEXT, 0, 1)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def _context(self, sequences: int, size: int, threads: int) -> Any:
        options = self.api.llama_context_default_params()
        options.n_seq_max, options.n_ctx = sequences, size
        options.n_batch = CONTEXT
        options.n_threads = options.n_threads_batch = threads
        context = self.api.llama_init_from_model(self.model, options)
        if not context:
            raise RuntimeError(f"llama.cpp made no context for {sequences} sequences")
        return context

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        return [time.perf_counter() for _ in self._steps(self.one, [prompt], new)]

    def batch(self, prompts: list[list[int]], new: int) -> int:
        return sum(map(len, self._steps(self.many, prompts, new)))

    def greedy(self, prompt: list[int], new: int) -> list[int]:
        return [token for (token,) in self._steps(self.one, [prompt], new)]

    def _steps(self, context: Any, prompts: list[list[int]], new: int) -> Iterator[list[int]]:
        """Yields the next token of every sequence, `new` times: first all prompts, then one token of each a step."""
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
        latest: list[int] = []
        for owner, prompt in enumerate(prompts):  # a step takes CONTEXT tokens at most
            latest += self._decode(context, [(owner, i, token) for i, token in enumerate(prompt)], len(prompt))
        yield latest
        for step in range(new - 1):
            placed = [(owner, len(p) + step, latest[owner]) for owner, p in enumerate(prompts)]
            latest = self._decode(context, placed, 1)
            yield latest

    def _decode(self, context: Any, placed: list[tuple[int, int, int]], every: int) -> list[int]:
        """Compute (sequence, position, token); the arg-max after each `every` of them."""
        import numpy as np

        batch = self.tokens
        batch.n_tokens = len(placed)
        ends = range(every - 1, len(placed), every)
        for i, (owner, position, token) in enumerate(placed):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, owner
            batch.logits[i] = i in ends
        if code := self.api.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with code {code}")
        rows = (self.api.llama_get_logits_ith(context, i) for i in ends)
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in rows]


def silence(api: Any) -> None:
    """Drop what llama.cpp logs."""
    _callbacks.append(api.llama_log_callback(lambda _level, _text, _data: None))
    api.llama_log_set(_callbacks[-1], None)


_callbacks: list[Any] = []
"""Held here: C keeps only a pointer."""


class OnnxRuntime(Engine):
    """ONNX Runtime GenAI; its batch is static and padded."""

    def __init__(self, model: str, threads: int) -> None:
        import onnxruntime_genai as og

        self.og = og
        config = og.Config(model)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)
        self.vocab_size = json.loads((Path(model) / "genai_config.json").read_text())["model"]["vocab_size"]

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        generator = self._start([prompt], new)
        return [self._step(generator) for _ in range(new)]

    def batch(self, prompts: list[list[int]], new: int) -> int:
        generator = self._start(prompts, new)
        for _ in range(new):
            self._step(generator)
        longest = max(map(len, prompts))
        return sum(len(generator.get_sequence(i)) - longest for i in range(len(prompts)))

    def _start(self, prompts: list[list[int]], new: int) -> Any:
        import numpy as np

        rows = np.array(padded(prompts, 2)[0], dtype=np.int32)
        length = rows.shape[1] + new
        params = self.og.GeneratorParams(self.model)
        # min_length keeps EOS away.
        params.set_search_options(batch_size=len(rows), max_length=length, min_length=length, do_sample=False)
        generator = self.og.Generator(self.model, params)
        generator.append_tokens(rows if len(rows) > 1 else rows[0])
        return generator

    @staticmethod
    def _step(generator: Any) -> float:
        generator.generate_next_token()
        return time.perf_counter()


class OpenVINO(Engine):
    """OpenVINO GenAI's continuous batching, prompts in chunks of at most 1,024 tokens."""

    def __init__(self, model: str, threads: int) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = KV_BLOCKS, BATCH, 1024
        scheduler.enable_prefix_caching = False
        self.genai = openvino_genai
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        return list(self._generate([prompt], new))

    def batch(self, prompts: list[list[int]], new: int) -> int:
        return sum(1 for _ in self._generate(prompts, new))

    def _generate(self, prompts: list[list[int]], new: int) -> Iterator[float]:
        import numpy as np
        import openvino

        config = self.genai.GenerationConfig(max_new_tokens=new, ignore_eos=True)
        config.set_eos_token_id(2)  # it asks for one; ignored
        handles = [
            self.pipeline.add_request(i, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for i, prompt in enumerate(prompts)
        ]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for handle in handles:
                if handle.can_read():
                    for output in handle.read().values():
                        yield from (time.perf_counter() for _ in output.generated_ids)


class VLLM(Engine):
    """In this process, without torch.compile: compiling takes longer than every workload here."""

    def __init__(self, model: str, threads: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=CONTEXT,
            max_num_seqs=BATCH,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
        )
        self.engine = llm.llm_engine
        self.vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        self.requests = 0

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        return list(self._generate([prompt], new))

    def batch(self, prompts: list[list[int]], new: int) -> int:
        return sum(1 for _ in self._generate(prompts, new))

    def _generate(self, prompts: list[list[int]], new: int) -> Iterator[float]:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self.engine.add_request(str(self.requests), TokensPrompt(prompt_token_ids=prompt), params)
            self.requests += 1
        counts: dict[str, int] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                count = len(output.outputs[0].token_ids)
                yield from (time.perf_counter() for _ in range(count - counts.get(output.request_id, 0)))
                counts[output.request_id] = count


class Entry(NamedTuple):
    """One row of the comparison."""

    package: str
    engine: type[Engine]
    format: str
    """What it reads: see cpu_formats.py; "file" is the GGUF file, "folder" its weights in bfloat16."""


ENGINES = {
    "rorqual": Entry("rorqual", Rorqual, "file"),
    "rorqual bf16": Entry("rorqual", RorqualBF16, "file"),
    "llama.cpp": Entry("llama-cpp-python", LlamaCpp, "file"),
    "llama.cpp Q4_0": Entry("llama-cpp-python", LlamaCpp, "gguf-q4_0"),
    "ONNX Runtime int4": Entry("onnxruntime-genai", OnnxRuntime, "onnx-int4"),
    "OpenVINO int8": Entry("openvino-genai", OpenVINO, "openvino-int8"),
    "vLLM bf16": Entry("vllm-cpu", VLLM, "folder"),
    "transformers bf16": Entry("transformers", Transformers, "folder"),
}


# ---- the worker: one engine, commands on stdin, one JSON line for each on stdout -------------------------------------


def work(name: str, model: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    start = time.perf_counter()
    engine = ENGINES[name].engine(model, threads)
    facts: dict[str, Any] = {"load_s": time.perf_counter() - start, "load_peak_bytes": peak_bytes()}
    facts |= {
        "vocab_size": engine.vocab_size,
        "build": engine.build,
        "version": importlib.metadata.version(ENGINES[name].package),
    }
    _forget_peak()
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        value = measure(engine, command["workload"], command["prompts"])
        print(json.dumps({"value": value, "peak_bytes": peak_bytes()}), file=answers, flush=True)


def measure(engine: Engine, workload: str, prompts: list[list[int]]) -> float:
    start = time.perf_counter()
    if workload == "b16":
        count = engine.batch(prompts, BATCH_NEW)
        _expect(count, BATCH * BATCH_NEW)
        return count / (time.perf_counter() - start)
    wanted = DECODE_NEW if workload == "decode" else 1
    times = engine.token_times(prompts[0], wanted)
    _expect(len(times), wanted)
    if workload == "decode":
        return (wanted - 1) / (times[-1] - times[0])
    return len(prompts[0]) / (times[0] - start)


def _expect(count: int, wanted: int) -> None:
    if count != wanted:
        raise RuntimeError(f"{count} tokens came out instead of {wanted}: their rate would mean nothing")


def peak_bytes() -> int:
    """The most memory that this process held since its start or the last _forget_peak."""
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    """Start the peak anew, where Linux allows it: loading may need more than running does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"the peak includes loading ({error})", file=sys.stderr)


def say_first_token(name: str, model: str, threads: int) -> None:
    """Load, generate one token, print a byte."""
    out = os.dup(1)
    os.dup2(2, 1)
    engine = ENGINES[name].engine(model, threads)
    engine.token_times(FIRST_TOKEN_IDS, 1)
    os.write(out, b".")


def installed() -> list[str]:
    """The engines that this interpreter can run."""
    names = []
    for name, entry in ENGINES.items():
        try:
            importlib.metadata.version(entry.package)
        except importlib.metadata.PackageNotFoundError:
            continue
        names.append(name)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description="One engine's process; cpu_vs_peers.py starts it.")
    parser.add_argument("task", choices=["list", "work", "first-token"])
    parser.add_argument("--engine", choices=list(ENGINES))
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    if asked.task == "list":
        print(json.dumps(installed()))
    else:
        {"work": work, "first-token": say_first_token}[asked.task](asked.engine, asked.model, asked.threads)


if __name__ == "__main__":
    main()
