"""Writes the model of cpu_vs_peers.py in the formats of other engines, by these engines' own tools."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from cpu_engines import silence


def convert(wanted: str, gguf: Path, plain: Path, out: Path) -> None:
    """Write the model in another format.

    gguf is the file, plain its weights in bfloat16 with a config.json; both hold the same values.
    """
    out.mkdir(parents=True, exist_ok=True)
    if wanted == "gguf-q4_0":
        requantize(gguf, out / "model.gguf", "Q4_0")
    elif wanted == "onnx-int4":
        tokenizer_files(gguf, plain)
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(plain), "-o", str(out)]
        builder += ["-p", "int4", "-e", "cpu", "-c", str(out / "cache"), "--extra_options", "int4_accuracy_level=4"]
        done = subprocess.run(builder, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ONNX Runtime's model builder failed:\n{done.stderr[-2000:]}")
    elif wanted == "openvino-int8":
        openvino_int8(gguf, out)
        (out / "config.json").write_bytes((plain / "config.json").read_bytes())
    else:
        raise ValueError(f"no way to write {wanted}")


def requantize(source: Path, target: Path, kind: str) -> None:
    """llama.cpp's own quantiser; kind is one of its file types, as Q4_0 or F16."""
    import ctypes

    from llama_cpp import llama_cpp as api

    silence(api)
    api.llama_backend_init()
    options = api.llama_model_quantize_default_params()
    options.ftype = getattr(api, f"LLAMA_FTYPE_{'MOSTLY_' if kind != 'F32' else 'ALL_'}{kind}")
    options.allow_requantize = True
    if api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp could not write {kind}")


def tokenizer_files(gguf: Path, folder: Path) -> None:
    """ONNX Runtime's builder wants a tokenizer, though ids go in and come out."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def openvino_int8(gguf: Path, out: Path) -> None:
    """OpenVINO reads GGUF; from half precision, its own tool rounds every matrix by rows."""
    import nncf
    import openvino
    import openvino_genai

    half = out / "half.gguf"
    requantize(gguf, half, "F16")
    openvino_genai.LLMPipeline(str(half), "CPU", enable_save_ov_model=True)  # beside the file
    model = openvino.Core().read_model(out / "openvino_model.xml")
    rounded = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    openvino.save_model(rounded, out / "int8.xml")
    del model, rounded
    for suffix in ("xml", "bin"):
        (out / f"int8.{suffix}").replace(out / f"openvino_model.{suffix}")
    half.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", choices=["gguf-q4_0", "onnx-int4", "openvino-int8"])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--plain", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    convert(asked.format, asked.gguf, asked.plain, asked.out)


if __name__ == "__main__":
    main()
