"""The compiled kernels: that they are there, that they are chosen right, and that a row's answer is its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from rorqual.ops.attention import paged_attention
from rorqual.ops.linear import linear, prepare_weight
from rorqual.ops.native import library
from rorqual.ops.native.library import kernels, missing, usable_isas, using
from rorqual.ops.registry import load_backends
from tests.ops.cases import normal
from tests.ops.paged_cases import attention_case, make_batch

load_backends("native", "cpu")
BF16 = torch.bfloat16
ISAS = pytest.mark.parametrize("isa", usable_isas())


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the package was installed without a compiler")
def test_kernels_are_built_where_there_is_a_compiler():
    assert "generic" in usable_isas()
    assert kernels() is not None


def test_best_instruction_set_is_chosen_and_another_can_be(monkeypatch):
    monkeypatch.delenv("RORQUAL_CPU_ISA", raising=False)
    library._chosen.cache_clear()
    assert kernels().isa == usable_isas()[0]
    with using("generic"):
        assert kernels().isa == "generic"
        with using(None):
            assert kernels() is None
            assert missing() == "the compiled kernels are switched off"
    assert missing() is None


def run_with(isa: str) -> subprocess.CompletedProcess[str]:
    code = "from rorqual.ops.native.library import kernels; k = kernels(); print(k and k.isa)"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RORQUAL_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("isa", ["generic", "none"])
def test_environment_chooses_the_instruction_set(isa):
    assert run_with(isa).stdout.strip() == {"none": "None"}.get(isa, isa)


def test_unknown_instruction_set_is_one_sentence():
    assert "RORQUAL_CPU_ISA=sse9 is not to be had here; allowed: " in run_with("sse9").stderr


def test_without_an_openmp_library_one_thread_does_the_work():
    """On a machine whose torch runs on another thread pool than GNU OpenMP."""
    code = (
        "import torch\n"
        "from rorqual.ops.native import library\n"
        "library._openmp = lambda: None\n"
        "from rorqual.ops.registry import load_backends\n"
        "load_backends('native')\n"
        "from rorqual.ops.linear import linear, prepare_weight\n"
        "x, w = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16)\n"
        "print(linear(x, prepare_weight(w)).unique().tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[32.0]"
    assert "run on one thread" in done.stderr


@ISAS
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_product_of_a_row_is_the_same_in_any_company_and_on_any_threads(isa, threads):
    x, weight, bias = normal(70, 1056, dtype=BF16), normal(112, 1056, dtype=BF16, seed=1), normal(112, dtype=BF16)
    before = torch.get_num_threads()
    with using(isa):
        packed = prepare_weight(weight)
        assert packed.dim() == 4
        alone = torch.cat([linear(x[i : i + 1], packed, bias) for i in range(len(x))])
        torch.set_num_threads(threads)
        try:
            for stop in (2, 5, 16, 17, 31, 32, 33, 48, 70):
                assert torch.equal(linear(x[:stop], packed, bias), alone[:stop]), stop
        finally:
            torch.set_num_threads(before)


@ISAS
@pytest.mark.parametrize("window", [None, 30])
def test_attention_of_a_token_is_the_same_in_any_chunk_and_company(isa, window):
    context = 1100
    with using(isa):
        case = attention_case(
            [context], [context], heads=6, kv_heads=2, head_dim=32, block_size=16, dtype=BF16, layout="own"
        )
        whole = paged_attention(*case.args, **case.options, sliding_window=window)
        for cuts in ([1, 3, 9, 200, 511, 512, 513, 700], [256, 1024, 1099]):
            for start, stop in zip([0, *cuts], [*cuts, context], strict=True):
                # The chunk, and beside it a single token of the same sequence, which comes first.
                query = torch.cat((case.query[700:701], case.query[start:stop]))
                batch = make_batch([1, stop - start], [701, stop])
                tables = case.block_tables.expand(2, -1)
                args = (query, case.key_cache, case.value_cache, batch, tables)
                got = paged_attention(*args, **case.options, sliding_window=window)
                assert torch.equal(got, torch.cat((whole[700:701], whole[start:stop]))), (start, stop)


@ISAS
@pytest.mark.parametrize("window", [None, 700])
def test_threads_share_the_spans_of_a_long_context(isa, window):
    """Two KV heads of one token are two tasks: more threads than tasks, and parts that are added up."""
    before = torch.get_num_threads()
    with using(isa):
        case = attention_case(
            [1, 3], [2100, 40], heads=6, kv_heads=2, head_dim=64, block_size=16, dtype=BF16, layout="own"
        )
        expected = paged_attention.reference(*case.args, **case.options, sliding_window=window)
        try:
            found = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found.append(paged_attention(*case.args, **case.options, sliding_window=window))
        finally:
            torch.set_num_threads(before)
    torch.testing.assert_close(found[0].float(), expected.float(), rtol=2e-2, atol=1e-2)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@ISAS
def test_attention_does_not_depend_on_the_block_size(isa):
    answers = []
    with using(isa):
        for block_size in (16, 48, 128):
            case = attention_case([40, 1], [700, 90], head_dim=64, block_size=block_size, dtype=BF16, layout="own")
            query = normal(*case.query.shape, dtype=BF16)
            keys = [normal(c, 4, 64, dtype=BF16, seed=c) for c in (700, 90)]
            for row, content in enumerate(keys):
                at = torch.arange(len(content))
                where = (case.block_tables[row].long()[at // block_size], at % block_size)
                case.key_cache[where] = content
                case.value_cache[where] = -content
            args = (query, case.key_cache, case.value_cache, case.batch, case.block_tables)
            answers.append(paged_attention(*args, **case.options))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
