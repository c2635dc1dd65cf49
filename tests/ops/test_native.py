"""The compiled kernels: that they are there, that they are chosen right, and that a row's answer is its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

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


def expect_products(threads: int, calls: int) -> None:
    """Products of several sizes on so many threads, again and again, equal to those on one thread."""
    before = torch.get_num_threads()
    made = [(normal(rows, 64, dtype=BF16, seed=rows), prepare_weight(normal(16 * n, 64, dtype=BF16, seed=n)))
            for rows, n in ((1, 1), (2, 40), (33, 9), (130, 3))]  # fmt: skip
    try:
        torch.set_num_threads(1)
        want = [linear(x, weight) for x, weight in made]
        torch.set_num_threads(threads)
        for i in range(calls):
            x, weight = made[i % len(made)]
            assert torch.equal(linear(x, weight), want[i % len(made)]), i
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_parts_are_all_done_however_many_threads_there_are_for_them(threads):
    """More threads than cores: some always come late, or not at all."""
    expect_products(threads, 2000)


def test_several_callers_at_once_disturb_nobody():
    """One of them gets the pool, the others work alone."""
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(expect_products, 3, 500) for _ in range(8)]:
            done.result()


def test_a_sleeping_pool_wakes_up():
    for pause in (0.0, 0.005, 0.05):
        time.sleep(pause)
        expect_products(3, 20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_process_has_a_pool_of_its_own():
    code = (
        "import os, torch\n"
        "from tests.ops.test_native import BF16, linear, normal, prepare_weight\n"
        "torch.set_num_threads(3)\n"
        "x, weight = normal(33, 64, dtype=BF16), prepare_weight(normal(144, 64, dtype=BF16))\n"
        "want = linear(x, weight)\n"
        "child = os.fork()\n"  # in which torch's own threads are dead: nothing there may use them
        "right = all(torch.equal(linear(x, weight), want) for _ in range(50))\n"
        "os._exit(not right) if child == 0 else None\n"
        "assert right and os.waitpid(child, 0)[1] == 0\n"
        "print('both')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "both"


def test_torch_does_not_spin_where_our_threads_work():
    code = "import os, rorqual; print(os.environ.get('GOMP_SPINCOUNT'))"
    for given, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")):
        env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | given
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        assert done.stdout.strip() == expected


@ISAS
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_product_of_a_row_is_the_same_in_any_company_and_on_any_threads(isa, threads):
    x, weight, bias = normal(70, 1056, dtype=BF16), normal(208, 1056, dtype=BF16, seed=1), normal(208, dtype=BF16)
    before = torch.get_num_threads()
    with using(isa):
        packed = prepare_weight(weight)
        assert packed.dim() == 4
        alone = torch.cat([linear(x[i : i + 1], packed, bias) for i in range(len(x))])
        torch.set_num_threads(threads)
        try:
            for stop in (2, 3, 5, 16, 17, 31, 32, 33, 48, 70):
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
