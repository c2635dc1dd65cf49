"""Engines that move experts between ranks while they run: the tokens of one rank, whose experts stay where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM
from rorqual.config import EngineConfig
from rorqual.distributed.expert_balance import ExpertLayout
from rorqual.distributed.mesh import Mesh
from rorqual.distributed.world import start_world
from rorqual.engine.expert_balancer import ExpertBalancer
from rorqual.layers.moe import Experts
from rorqual.loader.integer_quantization import IntegerQuantization
from rorqual.loader.quantization_config import LinearFormat
from rorqual.loader.weights import fill_with_dummy_weights, prepare_weights
from rorqual.ops.moe import Routing
from rorqual.ops.native.library import missing
from rorqual.quantization import FP8_BLOCK, MXFP4
from rorqual.quantization.integer import Q8_0
from tests.distributed.engines import HARD, PARAMS, PROMPTS, generate
from tests.distributed.ranks import on_ranks
from tests.engine.engines import TINY_OPTIONS
from tests.models import test_deepseek_v3_fp8, test_quantized_checkpoints
from tests.models.scattered import loaded_model
from tests.tiny import checkpoint_folder

OFTEN: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "num_redundant_experts": 2,
    "eplb_step_interval": 3,
    "eplb_window_size": 2,
}


def experts_of(engine: Any) -> list[list[list[torch.Tensor]]]:
    """Of each layer every tensor, by place."""
    return [layer.by_place() for layer in engine._runner.model.modules() if isinstance(layer, Experts)]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def _balanced(rank: int, store: Any, name: str, options: dict[str, Any], shares: list[list[int]]) -> Any:
    """One rank: tokens by request, the layouts that there were, and its experts in the end."""
    layouts: list[ExpertLayout] = []
    experts: list[list[list[torch.Tensor]]] = []

    def watch(engine: Any) -> None:
        balancer = engine._balancer
        rearrange = balancer._rearrange
        layouts.append(balancer.layout)

        def rearranged() -> None:
            rearrange()
            layouts.append(balancer.layout)

        balancer._rearrange = rearranged

    tokens = generate(rank, store, name, options, shares, before=watch, after=lambda it: experts.extend(experts_of(it)))
    return tokens, layouts, experts


def check(folder: Path, options: dict[str, Any], shares: list[list[int]]) -> None:
    options = HARD | OFTEN | options | {"check_ranks": True}
    size = options.get("tensor_parallel_size", 1) * options["data_parallel_size"]
    found = on_ranks(size, _balanced, str(folder), options, shares)
    with LLM(**(TINY_OPTIONS | {"model": str(folder)} | HARD)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        want = {i: output.outputs[0].token_ids for i, output in enumerate(outputs)}
        every = experts_of(llm.engine)
    tokens: dict[int, list[int]] = {}
    placed = [[str(layout.physical_to_logical.tolist()) for layout in layouts] for _, layouts, _ in found]
    assert len(set(placed[0])) > 2, "experts moved more than once"
    for rank, (of_rank, layouts, experts) in enumerate(found):
        tokens |= of_rank[0] if of_rank is not None else {}
        assert placed[rank] == placed[0], "ranks agree on where experts are"
        for held, here, of_all in zip(layouts[-1].on_rank(rank).tolist(), experts, every, strict=True):
            for by_place, by_expert in zip(here, of_all, strict=True):
                for expert, x in zip(held, by_place, strict=True):
                    assert torch.equal(as_bytes(x), as_bytes(by_expert[expert])), (rank, expert)
    assert tokens == {i: want[i] for share in shares for i in share}


def test_two_replicas_move_experts_while_they_generate():
    check(checkpoint_folder("qwen3_moe"), {}, [[0, 1, 2], [3, 4, 5]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme"), [("deepseek_v3", None), ("deepseek_v3", "fp8"), ("deepseek_v4", None), ("qwen3_moe", "mxfp4")]
)
def test_so_do_other_models_and_formats(name, scheme):
    if scheme is None:
        folder = checkpoint_folder(name)
    elif name == "deepseek_v3":
        folder, _ = test_deepseek_v3_fp8.folders(name, scheme)
    else:
        folder, _ = test_quantized_checkpoints.folders(name, scheme)
    check(folder, {}, [[4], [0, 1, 2, 3, 5]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_so_do_two_replicas_of_two_ranks(name):
    check(checkpoint_folder(name), {"tensor_parallel_size": 2}, [[0, 3, 5], [1, 2, 4]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_so_do_ranks_of_one_replica(name):
    options = {"tensor_parallel_size": 2, "data_parallel_size": 1, "num_redundant_experts": 0}
    check(checkpoint_folder(name), options, [list(range(6))])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel_size": 2}, "needs enable_expert_parallel and more than one rank"),
        ({"enable_expert_parallel": True}, "needs enable_expert_parallel and more than one rank"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "num_redundant_experts": 1},
            "data_parallel_size is 1: leave them out",
        ),
        (OFTEN | {"eplb_window_size": 4}, "eplb_window_size must be 1 to 3 steps, the eplb_step_interval, got 4"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**{"enable_eplb": True} | options)


def test_redundant_experts_that_nobody_moves_are_refused():
    with pytest.raises(ValueError, match=r"num_redundant_experts \(2\) are filled .* turn enable_eplb on"):
        start_world(EngineConfig(num_redundant_experts=2))


def test_models_without_experts_are_refused():
    mesh = Mesh.of_rank(0, dp_size=2, expert_parallel=True, num_redundant_experts=0)
    model = loaded_model(checkpoint_folder("llama"), mesh=mesh)
    with pytest.raises(ValueError, match="this model has none: leave it out"):
        ExpertBalancer(model, EngineConfig(**OFTEN), mesh, torch.device("cpu"))


def made_up_experts(dtype: torch.dtype, quantization: LinearFormat | None = None) -> Experts:
    made = Experts(3, 64, 96, mesh=Mesh.single(), dtype=dtype, device=torch.device("cpu"), quantization=quantization)
    model = torch.nn.ModuleList([made])
    fill_with_dummy_weights(model, seed=1)
    prepare_weights(model)
    return made


@pytest.mark.parametrize(
    ("dtype", "format"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, FP8_BLOCK), (torch.bfloat16, MXFP4)],
)
def test_experts_are_what_is_written_to_their_places(dtype, format):
    """Two change places; kernels that laid weights out, and know where they are, see it."""
    if dtype is torch.bfloat16 and missing():
        pytest.skip("oneDNN's layout is not to be written to")
    experts = made_up_experts(dtype, None if format is None else LinearFormat(format, None))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    weights = torch.full((5, 2), 0.5, dtype=dtype)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    before = experts(x, Routing(ids, weights))
    for of_place in experts.by_place():
        first = of_place[0].clone()
        of_place[0].copy_(of_place[2])
        of_place[2].copy_(first)
    assert not torch.equal(experts(x, Routing(ids, weights)), before)
    assert torch.equal(experts(x, Routing(torch.tensor([2, 1, 0])[ids], weights)), before)


def test_experts_of_integers_are_refused():
    names = [f"{e}.{name}_proj" for e in range(3) for name in ("gate", "up", "down")]
    integers = IntegerQuantization(dynamic=True, linear=Q8_0).of("0", *names)
    with pytest.raises(ValueError, match="cannot move experts whose weights are integers: leave it out"):
        made_up_experts(torch.bfloat16, integers).by_place()
