"""Models split over ranks: the same logits on every rank, to the bit, and those of one rank up to rounding."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.integer_quantization import IntegerQuantization
from rorqual.loader.quantization_config import WeightQuantization, read_weight_quantization
from rorqual.models.registry import build_model
from rorqual.ops.registry import load_backends
from rorqual.quantization.integer import Q4_1, Q8_0
from tests.distributed.ranks import connect, on_ranks
from tests.models import test_deepseek_v3_fp8, test_deepseek_v4_packed
from tests.models.scattered import loaded_model, logits_by_chunks, steps, tokens
from tests.models.test_deepseek_v3_mtp import with_block
from tests.models.test_deepseek_v4_mtp import folder_with
from tests.models.test_quantized_checkpoints import MODELS as QUANTIZED
from tests.quantized import SCHEMES, quantized_folders
from tests.tiny import CONFIGS, DEEPSEEK_CONFIGS, VOCAB, checkpoint_folder, random_deepseek, random_model
from tests.unit.tiny_gguf import MIXED_SIZES, mixed_kinds, smollm2_kinds, write_llama

load_backends("native", "cpu")

NUM_ANSWER = 6


class Case(NamedTuple):
    """A model in a folder, how to build it, and a text: a prompt, and what one rank answers."""

    path: Path
    options: dict[str, Any]
    text: list[int]
    rounds_inputs: bool = False
    """Whether products round their inputs to few bits, so that the last bits of sums may become large steps."""
    further: bool = False
    """Whether the logits are those of a block that predicts a further token; the text is any then."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the text that are no answer."""
        return len(self.text) - NUM_ANSWER


# Heads and widths that four ranks can share; two heads of keys and values, of which four ranks have copies.
_SHARED: dict[str, dict[str, Any]] = {
    name: {"num_attention_heads": 8} if model_type in ("llama", "mistral", "qwen2") else {}
    for name, (model_type, _) in CONFIGS.items()
}
_SHARED["mistral_window"] |= {"num_key_value_heads": 4}
_SHARED["deepseek_v4"] = {"o_groups": 4}


@functools.cache
def plain_case(name: str) -> Case:
    """A tiny model, its sizes made even."""
    model_type, options = (CONFIGS | DEEPSEEK_CONFIGS)[name]
    make = random_deepseek if name in DEEPSEEK_CONFIGS else random_model
    folder = Path(tempfile.mkdtemp(prefix=f"rorqual-shared-{name}-"))
    make(model_type, options | _SHARED.get(name, {})).save_pretrained(folder)
    return answered(folder, num_prompt=150 if model_type == "deepseek_v4" else 45)


def answered(path: Path, *, num_prompt: int = 45, rounds_inputs: bool = False, **options: Any) -> Case:
    """The case of a checkpoint, with a text to which it gives the answers."""
    model, text = loaded_model(path, **options), tokens(num_prompt)
    for _ in range(NUM_ANSWER):
        text.append(int(logits_by_chunks(model, text, len(text))[-1].argmax()))
    return Case(path, options, text, rounds_inputs)


def quantized_case(path: Path, *, rounds_inputs: bool = False) -> Case:
    """The case of a folder of quantised weights."""
    found = read_weight_quantization(open_checkpoint(path).config)
    assert isinstance(found, WeightQuantization)
    if not rounds_inputs:
        linear, experts = (formats._replace(activation=None) for formats in (found.linear, found.experts))
        found = dataclasses.replace(found, linear=linear, experts=experts)
    return answered(path, rounds_inputs=rounds_inputs, quantization=found)


@functools.cache
def scheme_folder(model: str, scheme: str) -> Path:
    """Shares of 40, 80 and 64 columns and rows, which do not fill blocks of 128."""
    model_type, options = QUANTIZED[model]
    target = Path(tempfile.mkdtemp(prefix=f"rorqual-shared-{model}-{scheme}-"))
    random_model(model_type, options | {"num_attention_heads": 8}).save_pretrained(target / "source")
    return quantized_folders(target / "source", target, SCHEMES[scheme])[0]


def integer_case(path: Path, *, rounds_inputs: bool) -> Case:
    """The case of a GGUF file whose integers are kept, or of plain weights that become integers."""
    stored = open_checkpoint(path).integer_formats
    kept = IntegerQuantization(dynamic=rounds_inputs, stored=stored, linear=Q4_1, table=Q8_0)
    return answered(path, rounds_inputs=rounds_inputs, quantization=kept)


def logits_of(case: Case, mesh: Mesh) -> torch.Tensor:
    """[num_tokens, vocabulary], the prompt in four chunks and every token of the answer in a step of its own."""
    model = loaded_model(case.path, mesh=mesh, **case.options)
    if case.further:
        return further_logits(model, case.text)
    return logits_by_chunks(model, case.text, 1, num_prompt=case.num_prompt, at_once=range(3, case.num_prompt))


@torch.inference_mode()
def further_logits(model: Any, text: list[int]) -> torch.Tensor:
    """Of the block behind the model, [num_tokens - 1, vocabulary]."""
    found = []
    for batch, part, kv in steps(model, text[:-1], 16):
        states = (model.streams if hasattr(model, "streams") else model)(batch, kv)
        next_ids = torch.tensor(text[part.start + 1 : part.stop + 1])
        found.append(model.compute_logits(model.predict_next(states, next_ids, batch, kv)))
    return torch.cat(found)


def on_rank(rank: int, store: Any, size: int, cases: dict[str, Case]) -> dict[str, torch.Tensor]:
    """The logits of every case on one of the ranks."""
    mesh = connect(rank, store, tp=size)
    return {name: logits_of(case, mesh) for name, case in cases.items()}


PLAIN = (*CONFIGS, *DEEPSEEK_CONFIGS)
SCHEME_MODELS = [("qwen3", "fp8"), ("qwen3_moe", "fp8"), ("llama_bias", "fp8_ue8m0"), ("qwen3_moe", "mxfp4")]
OTHER_SCHEMES = [("qwen3", scheme) for scheme in SCHEMES if scheme != "fp8"] + [("qwen3_moe", "mxfp8_tile")]


@functools.cache
def other_cases(size: int) -> dict[str, Case]:
    """Those that are not plain models."""
    root = Path(tempfile.mkdtemp(prefix="rorqual-shared-"))
    folders = {f"{name} {scheme}": scheme_folder(name, scheme) for name, scheme in SCHEME_MODELS}
    folders["deepseek_v32 fp8"] = test_deepseek_v3_fp8.folders("deepseek_v32", "fp8")[0]
    if size == 2:  # of whose groups four ranks have none
        folders["deepseek_v4 fp4"] = test_deepseek_v4_packed.folders("fp4")[0]
    cases = {name: quantized_case(path) for name, path in folders.items()}
    cases["qwen3 fp8, rounded inputs"] = quantized_case(folders["qwen3 fp8"], rounds_inputs=True)
    integers = {
        "mixed": write_llama(root / "mixed.gguf", mixed_kinds, **MIXED_SIZES, num_heads=8, tied=False),
        "tied": write_llama(root / "tied.gguf", smollm2_kinds, hidden_size=128, intermediate_size=192, vocab_size=205),
    }
    model_type, options = CONFIGS["qwen3_moe"]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
    moe = random_model(model_type, options | sizes)  # shares of four ranks are groups of 32
    moe.save_pretrained(root / "moe")
    integers["experts"] = root / "moe"
    for name, path in integers.items():
        for rounds_inputs in (False, True):
            inputs = "rounded" if rounds_inputs else "plain"
            cases[f"{name} integers, {inputs} inputs"] = integer_case(path, rounds_inputs=rounds_inputs)
    further = {name: with_block(name, root) for name in ("deepseek_v3", "deepseek_v32")}
    further["deepseek_v4"] = folder_with("block")
    for name, path in further.items():
        cases[f"{name} further"] = Case(path, {"with_mtp": True}, tokens(60), further=True)
    return cases


@functools.cache
def found_on(size: int) -> tuple[dict[str, Case], list[dict[str, torch.Tensor]]]:
    """All cases, and the logits of each on every rank: of processes that do them all."""
    cases = {name: plain_case(name) for name in PLAIN} | other_cases(size)
    return cases, on_ranks(size, on_rank, size, cases)


def check(case: Case, found: list[torch.Tensor]) -> None:
    """All ranks agree to the bit; with one rank up to rounding, and about every token of the answer."""
    alone = logits_of(case, Mesh.single())
    first, *others = found
    assert first.shape == alone.shape
    assert all(torch.equal(first, other) for other in others)
    if case.rounds_inputs:
        assert float((first - alone).square().mean().sqrt() / alone.std()) < 0.15
        return
    assert float((first - alone).abs().max()) < 1e-4
    if not case.further:
        assert first[case.num_prompt - 1 : -1].argmax(-1).tolist() == case.text[case.num_prompt :]


def test_some_on_two_ranks():
    """One of each kind; the others are slow."""
    cases = {name: plain_case(name) for name in ("llama", "qwen3_moe", "deepseek_v32", "deepseek_v4")}
    cases |= {"fp8": quantized_case(scheme_folder("qwen3", "fp8"))}
    found = on_ranks(2, on_rank, 2, cases)
    for name, case in cases.items():
        check(case, [each[name] for each in found])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("size", [2, 4])
def test_every_family(size, name):
    cases, found = found_on(size)
    check(cases[name], [logits[name] for logits in found])


OTHERS = [*(f"{name} {scheme}" for name, scheme in SCHEME_MODELS), "deepseek_v32 fp8", "qwen3 fp8, rounded inputs"]
OTHERS += [
    f"{name} integers, {inputs} inputs" for name in ("mixed", "tied", "experts") for inputs in ("plain", "rounded")
]
OTHERS += [f"{name} further" for name in ("deepseek_v3", "deepseek_v32", "deepseek_v4")]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("size", [2, 4])
def test_quantized_weights_and_further_blocks(size, name):
    """Nothing is rounded where weights are cut: the products are of the same numbers."""
    cases, found = found_on(size)
    check(cases[name], [logits[name] for logits in found])


@pytest.mark.slow
def test_deepseek_v4_with_packed_experts():
    cases, found = found_on(2)
    check(cases["deepseek_v4 fp4"], [logits["deepseek_v4 fp4"] for logits in found])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_scheme(size):
    cases = {f"{name} {scheme}": quantized_case(scheme_folder(name, scheme)) for name, scheme in OTHER_SCHEMES}
    found = on_ranks(size, on_rank, size, cases)
    for name, case in cases.items():
        check(case, [logits[name] for logits in found])


# --- what ranks cannot share


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        (
            "llama",
            4,
            r"num_attention_heads \(6\) cannot be split over 4 ranks: use a tensor_parallel_size that divides",
        ),
        ("mistral_window", 2, r"num_key_value_heads \(3\) and tensor_parallel_size \(2\): one must divide the other"),
        ("qwen3_moe", 16, r"num_attention_heads \(4\) cannot be split over 16 ranks"),
        ("deepseek_v3", 8, r"num_attention_heads \(4\) cannot be split over 8 ranks"),
        ("deepseek_v4", 4, r"the number of groups \(2\) cannot be split over 4 ranks"),
    ],
)
def test_heads_that_do_not_divide_are_refused_in_a_sentence(name, size, sentence):
    with pytest.raises(ValueError, match=sentence):
        sketch(checkpoint_folder(name), Mesh(0, size))


# --- what a rank holds


def sketch(path: Path, mesh: Mesh) -> Any:
    """A model without memory."""
    place = Placement(mesh, torch.bfloat16, torch.device("meta"), torch.bfloat16, 64)
    return build_model(open_checkpoint(path).config, place)


def sizes_of(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.nbytes for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", PLAIN)
def test_a_rank_holds_its_share_of_every_matrix_that_is_split(name):
    """A tied head holds nothing of its own."""
    path, size = plain_case(name).path, 4
    whole, shares = sizes_of(sketch(path, Mesh())), [sizes_of(sketch(path, Mesh(rank, size))) for rank in range(size)]
    split = {n for n in whole if any(part in n for part in SPLIT) and "indexer" not in n}
    split -= {n for n in whole if n.endswith(("o_proj.bias", "down_proj.bias"))}  # of sums, which have one
    assert split
    for name_there, num_bytes in whole.items():
        held = [share[name_there] for share in shares]
        if "qkv_proj" in name_there:  # heads of keys and values may be there twice
            assert num_bytes / size <= held[0] < num_bytes
        elif name_there in split:
            assert sum(held) == num_bytes
            assert held[0] - held[-1] <= size * num_bytes / VOCAB
        else:
            assert held == [num_bytes] * size


SPLIT = ("embed", "head.weight", "gate_up", "down", "q_proj", "q_b_proj", "kv_b_proj", "o_proj", "wq_b", "wo_", "sink")


@pytest.mark.parametrize(("size", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_caches_have_the_heads_of_the_rank(size, heads):
    path = plain_case("qwen2").path
    assert {spec.num_kv_heads for spec in sketch(path, Mesh(size - 1, size)).kv_specs} == {heads}
    path = plain_case("deepseek_v32").path
    assert sketch(path, Mesh(size - 1, size)).kv_specs == sketch(path, Mesh()).kv_specs, "latents of all heads"
