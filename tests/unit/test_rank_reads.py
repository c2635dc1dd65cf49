"""What one rank of several reads of a checkpoint, and what it makes of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from rorqual.distributed.mesh import Mesh
from rorqual.layers.embed_head import VocabParallelEmbedding
from rorqual.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from rorqual.loader.checkpoint import Checkpoint, open_checkpoint
from rorqual.loader.gguf import GGUFCheckpoint
from rorqual.loader.integer_quantization import IntegerQuantization
from rorqual.loader.quantization_config import LinearFormat
from rorqual.loader.staging import Staging
from rorqual.loader.weights import load_weights, wanted_tensors
from rorqual.ops.split_blocks import split_blocks
from rorqual.quantization import FP8_BLOCK, QTensor
from rorqual.quantization.gguf_blocks import BlockMatrix
from tests.layers.ranks import in_model, ranks
from tests.unit.tiny_gguf import random_rows, write_gguf

PLACE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
RANKS = 4
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """A checkpoint of these tensors."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    return open_checkpoint(folder)


def bytes_read() -> int:
    """What this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


Make = Callable[[Mesh], torch.nn.Module]
FP8 = LinearFormat(FP8_BLOCK, None)
WEIGHT = 512 * 256
LAYERS: dict[str, tuple[Make, dict[str, tuple[int, ...]], float]] = {
    "column": (
        lambda mesh: ColumnParallelLinear(256, {"up": 512}, mesh=mesh, bias=True, **PLACE),
        {"up.weight": (512, 256), "up.bias": (512,)},
        4 * (WEIGHT + 512) / RANKS,
    ),
    "heads": (
        lambda mesh: QKVParallelLinear(256, head_dim=16, num_heads=32, num_kv_heads=2, mesh=mesh, **PLACE),
        {"q_proj.weight": (512, 256), "k_proj.weight": (32, 256), "v_proj.weight": (32, 256)},
        4 * (WEIGHT / RANKS + 2 * 16 * 256),
    ),
    "vocabulary": (
        lambda mesh: VocabParallelEmbedding(512, 256, mesh=mesh, **PLACE),
        {"0.weight": (512, 256)},
        4 * WEIGHT / RANKS,
    ),
    "FP8 column": (
        lambda mesh: ColumnParallelLinear(256, {"up": 512}, mesh=mesh, quantization=FP8, **PLACE),
        {"up.weight": (512, 256), "up.weight_scale_inv": (4, 2)},
        WEIGHT / RANKS + 4 * 8,
    ),
    # Columns lie in every row, and rows are read whole.
    "row": (lambda mesh: RowParallelLinear(256, 512, mesh=mesh, **PLACE), {"0.weight": (512, 256)}, 4 * WEIGHT),
}


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    if "up.weight_scale_inv" in whole:
        made = QTensor.quantize(whole["up.weight"], FP8_BLOCK)
        whole |= {"up.weight": made.values, "up.weight_scale_inv": made.scales}
    return whole


@needs_proc
@pytest.mark.parametrize("buffer_bytes", [512, 5000, 1 << 20])
@pytest.mark.parametrize("kind", LAYERS)
def test_bytes_that_a_rank_reads_on_its_way_to_a_device(kind, buffer_bytes, tmp_path):
    """Of a matrix that is split by rows its share; the numbers are those of a rank that looks at a mapped file."""
    make, shapes, want = LAYERS[kind]
    checkpoint = saved(tmp_path, drawn(shapes))
    for name in shapes:
        assert checkpoint.stored(name)  # the header has been read
    for mesh in ranks(RANKS):
        staged, mapped = in_model(make(mesh)), in_model(make(mesh))
        for parameter in staged.parameters():
            parameter.data.view(torch.uint8).fill_(0x7F)
        with Staging(torch.device("cpu"), buffer_bytes=buffer_bytes) as staging:
            before, cost = bytes_read(), bytes_read()
            load_weights(staged, checkpoint, tied_tensors={}, num_threads=1, staging=staging)
            # Reading the number is some bytes, whose number is its length.
            assert abs(bytes_read() - cost - (cost - before) - want) < 10
        load_weights(mapped, checkpoint, tied_tensors={}, num_threads=1)
        for got, expected in zip(staged.parameters(), mapped.parameters(), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def bytes_mapped(path: Path) -> int:
    """What of a file is in this process's memory because somebody looked at it."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@needs_proc
def test_pages_that_a_rank_touches_of_a_mapped_file(tmp_path):
    """Those of its rows, and some on either side."""
    rows, columns = 1 << 20, 16
    checkpoint = saved(tmp_path, {"0.weight": torch.ones(rows, columns)})
    layer = in_model(VocabParallelEmbedding(rows, columns, mesh=ranks(RANKS)[1], **PLACE))
    load_weights(layer, checkpoint, tied_tensors={}, num_threads=1)
    share = 4 * rows * columns / RANKS
    assert share <= bytes_mapped(tmp_path / "model.safetensors") < 1.5 * share


def test_a_tensor_that_repeats_another_is_compared_by_the_ranks_that_keep_the_rows(tmp_path, caplog):
    repeated = torch.ones(8, 4)
    repeated[5] = 2.0
    checkpoint = saved(tmp_path, {"0.weight": torch.ones(8, 4), "head.weight": repeated})
    for rank, mesh in enumerate(ranks(RANKS)):
        layer = in_model(VocabParallelEmbedding(8, 4, mesh=mesh, **PLACE))
        load_weights(layer, checkpoint, tied_tensors={"head.weight": "0.weight"}, num_threads=1)
        assert ("head.weight differs from 0.weight" in caplog.text) == (rank == 2)
        caplog.clear()


# --- GGUF


HEADS, KV_HEADS, HIDDEN, INNER = 8, 2, 512, 768


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> GGUFCheckpoint:
    """A layer of a Llama, whose query and key rows have another order in the file; blocks of 256 columns."""
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    names = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    rows = {name: random_rows(*shape, Type.Q4_K, seed=i) for i, (name, shape) in enumerate(names.items())}
    path = write_gguf(
        tmp_path_factory.mktemp("stored") / "m.gguf",
        keys={
            "embedding_length": HIDDEN,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
        },
        tensors={"token_embd.weight": np.zeros((10, HIDDEN), np.float32)} | rows,
        types=dict.fromkeys(rows, Type.Q4_K),
    )
    return GGUFCheckpoint(path)


@pytest.mark.parametrize("rows", [slice(0, 64), slice(64, 128), slice(32, 96), slice(3, 4), slice(0, 128)], ids=str)
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"])
def test_some_rows_of_a_file_are_those_of_all(stored, name, rows):
    full = f"model.layers.0.{name}.weight"
    assert torch.equal(stored.load_blocks(full, rows).data, stored.load_blocks(full).data[rows])
    assert torch.equal(stored.load(full, rows)[rows], stored.load(full)[rows])
    assert stored.load(full, rows).shape == stored.shape(full)


def test_stored_columns_are_cut_between_blocks(stored):
    whole = stored.load_blocks("model.layers.0.mlp.down_proj.weight")
    cut = whole.slice_columns(slice(256, 768))
    assert torch.equal(split_blocks(cut).dequantize(), split_blocks(whole).dequantize()[:, 256:])
    with pytest.raises(ValueError, match="stored columns of q4_k are cut at multiples of 256, got 256 to 400"):
        whole.slice_columns(slice(256, 400))


@pytest.mark.parametrize(("size", "widths"), [(1, [768]), (2, [512, 512]), (3, [256] * 3), (4, [256, 512, 512, 256])])
def test_a_rank_takes_only_its_blocks_apart(stored, size, widths, monkeypatch):
    """Its rows of what is split by rows; of the rest the blocks with its columns, of which it keeps its own."""
    seen: list[tuple[int, int]] = []

    def counted(blocks: BlockMatrix) -> Any:
        seen.append(tuple(blocks.shape))
        return split_blocks(blocks)

    monkeypatch.setattr("rorqual.layers.stacked_weight.split_blocks", counted)
    monkeypatch.setattr("rorqual.loader.weights.split_blocks", counted)
    kept = IntegerQuantization(dynamic=True, stored=stored.integer_formats)
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    whole = {name: split_blocks(stored.load_blocks(name)).dequantize() for name in (up, down)}
    for rank, mesh in enumerate(ranks(size)):
        prefix = "model.layers.0.mlp"
        parts = {
            "up_proj": ColumnParallelLinear(
                HIDDEN, {"up_proj": INNER}, mesh=mesh, quantization=kept.of(prefix, "up_proj"), **PLACE
            ),
            "down_proj": RowParallelLinear(
                INNER, HIDDEN, mesh=mesh, quantization=kept.of(prefix, "down_proj"), **PLACE
            ),
        }
        model = placed(torch.nn.ModuleDict(parts))
        seen.clear()
        load_weights(model, Only(stored, wanted_tensors(model)), tied_tensors={}, num_threads=1)
        assert seen == [(INNER // size, HIDDEN), (HIDDEN, widths[rank])]
        operands = {name: parts[name].operand for name in parts}
        assert torch.equal(operands["up_proj"].dequantize(), whole[up].chunk(size)[rank])
        assert torch.equal(operands["down_proj"].dequantize(), whole[down].chunk(size, 1)[rank])
        assert all(operand.nbytes == parts[name].integer_bytes() for name, operand in operands.items())


def placed(mlp: torch.nn.Module) -> torch.nn.Module:
    """Below the names that a checkpoint gives it."""
    layer = torch.nn.ModuleDict({"mlp": mlp})
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})})


class Only:
    """Some tensors of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        self._checkpoint, self._names = checkpoint, set(names)

    def names(self) -> set[str]:
        return self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)
