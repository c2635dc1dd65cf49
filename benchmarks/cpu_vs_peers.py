"""Rorqual beside other engines on this CPU: the same weights, prompts and threads, in alternating runs.

    python benchmarks/cpu_vs_peers.py --rounds 5

Workloads, all greedy and with EOS ignored (random token ids, new ones in every round, the same for every engine):

    decode       32 prompt tokens, 128 new; tokens after the first one, over their time
    prefill      1,024 prompt tokens, 1 new; prompt tokens over the time to that token
    b16          16 prompts of 100 to 500 tokens submitted at once, 100 new each; new tokens over the whole time
    first token  seconds from the start of a new process to its first token, files in the page cache

Rorqual runs as `rorqual generate` does: with the file's integers kept ("rorqual"), and with bfloat16 weights ("rorqual
bf16", --quantization none); its cache holds the sixteen sequences, as the peers' do. transformers gets the file's
weights dequantised to bfloat16 in a safetensors folder, and for "first token" the prompt as ids: it reads neither GGUF
nor a tokenizer. Where llama-cpp-python is installed it reads the GGUF file; its Python API has no batch of requests, so
b16 runs one by one.

Every engine lives in a process of its own and waits on its standard input while another one runs, so they share
neither threads nor allocator. A round is discarded first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
DECODE_PROMPT, DECODE_NEW = 32, 128
PREFILL_PROMPT = 1024
BATCH, BATCH_PROMPT, BATCH_NEW = 16, (100, 500), 100
CONTEXT = 2048
"""Tokens of context that every engine is given."""
FIRST_TOKEN_PROMPT = "The blue whale is"
FIRST_TOKEN_IDS = [504, 4461, 15682, 314]
"""The same for the peers, in SmolLM2's ids; for another model it is some other prompt of that length."""
ENGINES = {
    "rorqual": "rorqual",
    "rorqual bf16": "rorqual",
    "transformers": "transformers",
    "llama-cpp-python": "llama_cpp",
}
"""Name in the table -> the module that must be there."""
UNITS = {"decode": "tok/s", "prefill": "tok/s", "b16": "tok/s", "first token": "s"}


class Engine(Protocol):
    """What a worker needs of an engine."""

    vocab_size: int

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        """Generate `new` tokens; the time on perf_counter's clock at which each was there."""

    def batch(self, prompts: list[list[int]], new: int) -> int:
        """Generate `new` tokens for every prompt, all submitted at once; returns how many came out."""


class Rorqual:
    quantization = "auto"

    def __init__(self, model: str, threads: int) -> None:
        from rorqual import LLM, SamplingParams

        self.llm = LLM(
            model,
            progress=False,
            threads=threads,
            max_model_len=CONTEXT,
            quantization=self.quantization,
            num_kv_blocks=BATCH * (-(-(BATCH_PROMPT[1] + BATCH_NEW) // 16) + 1),
        )
        self.params = SamplingParams(temperature=0, ignore_eos=True)
        self.vocab_size = self.llm.engine.vocab_size

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        deltas = self.llm.stream(prompt, self.params.clone(max_tokens=new))
        return [time.perf_counter() for delta in deltas for _ in delta.token_ids]

    def batch(self, prompts: list[list[int]], new: int) -> int:
        outputs = self.llm.generate(prompts, self.params.clone(max_tokens=new), use_tqdm=False)
        return sum(len(output.token_ids) for output in outputs)


class RorqualBF16(Rorqual):
    quantization = "none"


class Transformers:
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

        class Clock(BaseStreamer):  # type: ignore[misc]
            def put(self, value: Any) -> None:
                times.append(time.perf_counter())

            def end(self) -> None:
                pass

        self._generate([prompt], new, streamer=Clock())
        return times[1:]  # the first call hands over the prompt

    def batch(self, prompts: list[list[int]], new: int) -> int:
        longest = max(map(len, prompts))
        made = self._generate(prompts, new)
        return int((made.shape[1] - longest) * made.shape[0])

    def _generate(self, prompts: list[list[int]], new: int, **options: Any) -> Any:
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            return self.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


class LlamaCpp:
    """Requests run one after the other. Without its repacked weights, whose AMX kernels end in SIGILL (0.3.36)."""

    def __init__(self, model: str, threads: int) -> None:
        from llama_cpp import Llama, llama_cpp

        defaults = llama_cpp.llama_model_default_params

        def without_repacking() -> Any:
            params = defaults()
            params.use_extra_bufts = "amx_tile" not in Path("/proc/cpuinfo").read_text()
            return params

        llama_cpp.llama_model_default_params = without_repacking
        self.llm = Llama(model, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False)
        self.vocab_size = self.llm.n_vocab()

    def token_times(self, prompt: list[int], new: int) -> list[float]:
        times: list[float] = []
        self.llm.reset()
        for _ in self.llm.generate(prompt, temp=0.0):
            times.append(time.perf_counter())
            if len(times) == new:
                break
        return times

    def batch(self, prompts: list[list[int]], new: int) -> int:
        return sum(len(self.token_times(prompt, new)) for prompt in prompts)


MAKERS: dict[str, Callable[[str, int], Engine]] = {
    "rorqual": Rorqual,
    "rorqual bf16": RorqualBF16,
    "transformers": Transformers,
    "llama-cpp-python": LlamaCpp,
}


# ---- the worker: one engine, commands on stdin, one JSON line for each on stdout -------------------------------------


def work(name: str, model: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    start = time.perf_counter()
    engine = MAKERS[name](model, threads)
    facts = {"load_s": time.perf_counter() - start, "vocab_size": engine.vocab_size, "load_peak_bytes": peak_bytes()}
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


# ---- the driver ------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, name: str, model: str, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", name, "--model", model, "--threads", str(threads)]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(threads)
        )
        self.facts = self._answer()
        self.peak_bytes: dict[str, int] = {}

    def run(self, workload: str, prompts: list[list[int]]) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"workload": workload, "prompts": prompts}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.peak_bytes[workload] = answer["peak_bytes"]
        return float(answer["value"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.name} process ended with code {self.process.wait()}; its stderr says why")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def as_bfloat16_folder(model: Path, folder: Path) -> Path:
    """Write the weights of a GGUF file as transformers reads them fastest; a folder is taken as it is."""
    if model.is_dir():
        return model
    import torch
    from safetensors.torch import save_file

    from rorqual.loader.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    tensors = {name: checkpoint.load(name).to(torch.bfloat16).contiguous() for name in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config | {"dtype": "bfloat16"}))
    return folder


def draw(workload: str, vocab_size: int, seed: int) -> list[list[int]]:
    draw = random.Random(f"{workload} {seed}")
    lengths = {"decode": [DECODE_PROMPT], "prefill": [PREFILL_PROMPT]}.get(workload)
    lengths = lengths or [draw.randint(*BATCH_PROMPT) for _ in range(BATCH)]
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def first_token_s(name: str, model: str, threads: int) -> float:
    """From the start of a new process to its first byte of text."""
    if name.startswith("rorqual"):
        command = [sys.executable, "-m", "rorqual", "generate", "-m", model, "--threads", str(threads), "--quiet"]
        command += ["--quantization", "none" if name == "rorqual bf16" else "auto"]
        command += ["--max-tokens", "8", FIRST_TOKEN_PROMPT]
    else:
        command = [sys.executable, __file__, "--first-token", name, "--model", model, "--threads", str(threads)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=_environment(threads)) as process:
        assert process.stdout is not None
        got = process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.stdout.read()
    if not got or process.returncode:
        raise RuntimeError(f"{name} gave no first token: exit code {process.returncode}")
    return elapsed


def say_first_token(name: str, model: str, threads: int) -> None:
    """What first_token_s starts for the peers: load, generate one token, print a byte."""
    out = os.dup(1)
    os.dup2(2, 1)
    engine = MAKERS[name](model, threads)
    engine.token_times(FIRST_TOKEN_IDS, 1)
    os.write(out, b".")


def _environment(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def compare(models: dict[str, str], *, threads: int, rounds: int, workloads: list[str]) -> dict[str, Any]:
    """Raw values by workload and engine, after one discarded round; engines alternate within each workload."""
    names = list(models)
    workers = {name: Worker(name, models[name], threads) for name in names}
    vocab_size = min(worker.facts["vocab_size"] for worker in workers.values())
    values: dict[str, dict[str, list[float]]] = {w: {name: [] for name in names} for w in workloads}
    for number in range(-1, rounds):
        for workload in workloads:
            # Whoever goes first finds a cooler machine: take turns.
            turn = names[number % len(names) :] + names[: number % len(names)]
            for name in turn:
                if workload == "first token":
                    value = first_token_s(name, models[name], threads)
                else:
                    value = workers[name].run(workload, draw(workload, vocab_size, number))
                print(f"round {number} {workload}: {name} {value:.4g} {UNITS[workload]}", file=sys.stderr, flush=True)
                if number >= 0:
                    values[workload][name].append(value)
    for worker in workers.values():
        worker.close()
    memory = {
        name: {"load_peak_bytes": w.facts["load_peak_bytes"], "peak_bytes": w.peak_bytes} for name, w in workers.items()
    }
    return {"values": values, "memory": memory, "load_s": {n: w.facts["load_s"] for n, w in workers.items()}}


def table(result: dict[str, Any], names: list[str]) -> str:
    """Medians, the spread behind them, and Rorqual's advantage over each peer (above 1 is better, also for seconds)."""
    peers = [name for name in names if name != "rorqual"]
    lines = [
        "| workload | " + " | ".join([*names, *(f"vs {peer}" for peer in peers)]) + " |",
        "|---" * (1 + len(names) + len(peers)) + "|",
    ]
    for workload, by_engine in result["values"].items():
        medians = {name: statistics.median(by_engine[name]) for name in names}
        cells = [f"{medians[n]:.4g} ({min(by_engine[n]):.4g} to {max(by_engine[n]):.4g})" for n in names]
        for peer in peers if "rorqual" in names else []:
            gain = medians["rorqual"] / medians[peer]
            cells.append(f"{1 / gain if UNITS[workload] == 's' else gain:.2f}x")
        lines.append(f"| {workload}, {UNITS[workload]} | " + " | ".join(cells) + " |")
    for title, read in (
        ("peak RSS while it runs, MB", lambda memory: max(memory["peak_bytes"].values(), default=0)),
        ("peak RSS while it loads, MB", lambda memory: memory["load_peak_bytes"]),
    ):
        used = {name: read(result["memory"][name]) / 1e6 for name in names}
        ratios = [f"{used[peer] / used['rorqual']:.2f}x" for peer in peers] if used.get("rorqual") else []
        lines.append(f"| {title} | " + " | ".join([*(f"{used[name]:.0f}" for name in names), *ratios]) + " |")
    return "\n".join(lines)


def write(result: dict[str, Any], names: list[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "cpu_vs_peers.json").write_text(json.dumps(result, indent=2) + "\n")
    facts = result["environment"]
    machine, versions = facts["machine"], facts["versions"] | result["peer_versions"]
    about = [
        f"- machine: {machine['cpu']}, {machine['cores_usable']} cores usable, {', '.join(machine['isa'])}",
        f"- model: {result['model_file']}; {result['threads']} threads for every engine; medians of {result['rounds']} "
        "alternating rounds, (smallest to largest)",
        f"- versions: rorqual {facts['rorqual']}, " + ", ".join(f"{n} {v}" for n, v in versions.items() if v),
        f"- date {facts['date']}, commit {facts['commit']}",
        f"- command: `{result['command']}`; what the workloads are stands at the top of that file",
    ]
    text = "\n".join(["# CPU: Rorqual beside other engines", "", *about, "", table(result, names), ""])
    (out / "cpu_vs_peers.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a .gguf file, a folder, or a short name of Rorqual's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), help="default: those that are installed")
    parser.add_argument("--workloads", nargs="+", choices=list(UNITS), default=list(UNITS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--worker", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--first-token", choices=list(ENGINES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, asked.model, asked.threads)
    elif asked.first_token:
        say_first_token(asked.first_token, asked.model, asked.threads)
    else:
        drive(asked)


def drive(asked: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT))
    from rorqual.cli.collect_env import environment, package_versions
    from rorqual.loader.source import resolve_model

    model = resolve_model(asked.model).resolve()
    names = asked.engines or [name for name, module in ENGINES.items() if importlib.util.find_spec(module)]
    if "llama-cpp-python" in names and model.is_dir():
        names.remove("llama-cpp-python")  # reads GGUF files only
    with tempfile.TemporaryDirectory(prefix="rorqual-bench-") as folder:
        models = {name: str(model) for name in names}
        if "transformers" in names:
            models["transformers"] = str(as_bfloat16_folder(model, Path(folder)))
        result = compare(models, threads=asked.threads, rounds=asked.rounds, workloads=asked.workloads)
    result |= {
        "benchmark": "cpu_vs_peers",
        "model_file": model.name,
        "threads": asked.threads,
        "rounds": asked.rounds,
        "command": " ".join(["python", "benchmarks/cpu_vs_peers.py", *sys.argv[1:]]),
        "environment": environment(),
        "peer_versions": package_versions(name for name in names if name != "rorqual"),
    }
    write(result, names, asked.out)
    print(table(result, names))


if __name__ == "__main__":
    main()
