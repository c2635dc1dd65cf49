"""The draw, the order of candidates and the penalties, against plain definitions; CPU answers against references."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rorqual.ops.cpu.sample as cpu
from rorqual.ops import sample
from rorqual.ops.native.library import usable_isas, using
from rorqual.ops.native.sample import narrow_native, row_max_native

MASK32 = 2**32 - 1


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Many small tensors: waking a second thread costs more than it saves, and most on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def keys_of(seeds, positions):
    return torch.tensor([sample.row_key(s, p) for s, p in zip(seeds, positions, strict=True)])


def draws(logits, seeds, positions, temperature=1.0):
    """One draw per (seed, position) from the same logits."""
    rows = torch.tensor(logits).expand(len(seeds), len(logits))
    t = torch.full((len(seeds),), temperature, dtype=torch.float64)
    return sample.gumbel_argmax(rows, t, keys_of(seeds, positions)).numpy()


def chi_square_z(counts, expected) -> float:
    """How many standard deviations too uneven the counts are (Wilson and Hilferty's normal approximation)."""
    df = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


# --- the noise


def test_mix64_is_splitmix64():
    golden, state, outputs = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + golden) % 2**64
        outputs.append(sample.mix64(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]  # the published test vector


def test_noise_bits_follow_their_definition():
    def xorshift_multiply(x, steps):
        for shift, multiplier in steps:
            x = ((x ^ (x >> shift)) * multiplier) % 2**32
        return x

    keys = [sample.row_key(3, 14), (0, MASK32), (MASK32, 0)]
    ids = [0, 1, 2, 49151, 151935, MASK32]
    expected = [
        [
            xorshift_multiply(
                xorshift_multiply(i ^ a, [(16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)]) ^ b,
                [(16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)],
            )
            for i in ids
        ]
        for a, b in keys
    ]
    assert sample.noise_bits(torch.tensor([ids]), torch.tensor(keys)).tolist() == expected
    assert [cpu.noise_bits(np.array(ids, np.uint32), key).tolist() for key in keys] == expected


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=5))
def test_row_keys_are_those_of_each_row(rows):
    seeds, positions = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    assert sample.row_keys(seeds, positions).tolist() == [list(sample.row_key(*row)) for row in rows]


def test_the_stream_never_changes():
    """Frozen values: a change here changes every seeded answer."""
    assert sample.row_key(0, 0) == (4282176703, 1210155558)
    assert sample.row_key(2**64 - 1, 131071) == (1364391833, 2487379826)
    keys = keys_of([0, 7], [0, 42])
    assert sample.noise_bits(torch.tensor([[0, 1, 2, 49151, 151935]]), keys).tolist() == [
        [3734092140, 981786989, 1314842509, 3058364118, 389616230],
        [1830368558, 1718983598, 3554185168, 1174080630, 1478868383],
    ]
    assert draws([0.0] * 1000, [0] * 6, range(6)).tolist() == [377, 601, 512, 388, 766, 955]
    assert draws([0.0] * 1000, [2**64 - 1] * 6, range(6)).tolist() == [945, 872, 571, 324, 175, 482]


@pytest.mark.parametrize("input_bit", range(0, 32, 5))
def test_every_input_bit_flips_half_of_the_output_bits(input_bit):
    ids = torch.arange(4096)[None]
    key = keys_of([9], [9])
    flipped_id = sample.noise_bits(ids ^ (1 << input_bit), key) ^ sample.noise_bits(ids, key)
    other_keys = [
        sample.noise_bits(ids, key ^ torch.tensor([[a, b]])) for a, b in ((1 << input_bit, 0), (0, 1 << input_bit))
    ]
    for changed in (flipped_id, *(bits ^ sample.noise_bits(ids, key) for bits in other_keys)):
        rate = ((changed[0, :, None] >> torch.arange(32)) & 1).double().mean(0)
        assert (rate - 0.5).abs().max() < 0.06


# --- the draw

WEIGHTS = [0.0, 1.5, -2.0, 0.3, 2.2, -0.7, 1.0, -4.0, 0.0, 0.9]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_draws_follow_softmax(along, temperature):
    count = 20_000
    seeds, positions = ([5] * count, range(count)) if along == "positions" else (range(count), [5] * count)
    found = np.bincount(draws(WEIGHTS, seeds, positions, temperature), minlength=len(WEIGHTS))
    p = torch.tensor(WEIGHTS, dtype=torch.float64).div(temperature).softmax(0).numpy()
    assert -4 < chi_square_z(found, p * count) < 4


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (2**32, 0), (1, -1), (0x9E3779B97F4A7C15, -1)])
def test_neighbouring_positions_and_seeds_are_independent(step):
    """Pairs of draws one step apart fill the table of products evenly."""
    count, kinds = 20_000, 8
    seeds = [(1000 + step[0]) % 2**64 if moved else 1000 for moved in (False, True)]
    pairs = [
        draws([0.0] * kinds, [s] * count, range(10 + d, 10 + d + count))
        for s, d in zip(seeds, (0, step[1]), strict=True)
    ]
    table = np.bincount(pairs[0] * kinds + pairs[1], minlength=kinds**2)
    assert -4 < chi_square_z(table, np.full(kinds**2, count / kinds**2)) < 4


def test_rare_tokens_are_drawn_as_often_as_they_should():
    """A wide flat tail below one likely token, where coarse noise would show."""
    count, tail = 2000, 20_000
    logits = [0.0] * tail
    logits[0] = math.log(tail)
    found = draws(logits, [3] * count, range(count))
    assert abs((found == 0).mean() - 0.5) < 4 * 0.5 / math.sqrt(count)
    rest = found[found != 0]
    assert -4 < chi_square_z(np.bincount(rest * 10 // tail, minlength=10), np.full(10, len(rest) / 10)) < 4


def test_a_masked_token_is_never_drawn():
    logits = [-math.inf, 0.0, -math.inf, -50.0]
    assert set(draws(logits, [1] * 2000, range(2000)).tolist()) == {1}
    long_row = [-math.inf] * 5000
    long_row[4321] = -70.0
    assert draws(long_row, [1, 2], [3, 4]).tolist() == [4321, 4321]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.6, 30.0, 1e6, 1e300])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_draw_equals_the_reference(temperature, spread, dtype):
    rows, width = 12, 5003
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(rows, width, generator=generator) * spread).to(dtype)
    logits[3, 100:] = -math.inf
    logits[4] += 1000.0
    logits[5, 17] = 3e38
    t = torch.full((rows,), temperature, dtype=torch.float64)
    for position in range(8):
        keys = keys_of(range(rows), [position] * rows)
        assert sample.gumbel_argmax.choose(logits, t, keys) is cpu.gumbel_argmax
        torch.testing.assert_close(
            cpu.gumbel_argmax(logits, t, keys), sample.gumbel_argmax.reference(logits, t, keys), rtol=0, atol=0
        )


def test_the_cpu_draw_equals_the_reference_when_the_noise_of_the_best_token_is_poor():
    """The bound is loosest where a likely token has v close to 1: then many are finalists."""
    logits = torch.zeros(1, 5003)
    logits[0, 7] = 6.0
    worst = sorted(range(3000), key=lambda p: -int(sample.noise_bits(torch.tensor([[7]]), keys_of([1], [p]))))[:40]
    for position in worst:
        args = (logits, torch.ones(1, dtype=torch.float64), keys_of([1], [position]))
        assert cpu.gumbel_argmax(*args).item() == sample.gumbel_argmax.reference(*args).item() != 7


@pytest.mark.parametrize("width", [61, 5003, 49152])
def test_a_row_draws_alone_what_it_draws_in_a_batch(width):
    rows = 9
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(2))
    t = torch.linspace(0.3, 2, rows, dtype=torch.float64)
    keys = keys_of(range(rows), range(100, 100 + rows))
    batch = sample.gumbel_argmax(logits, t, keys)
    alone = [sample.gumbel_argmax(logits[i : i + 1], t[i : i + 1], keys[i : i + 1]).item() for i in range(rows)]
    assert batch.tolist() == alone


# --- the order of candidates

AWKWARD = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -math.inf, 1e-40, -1e-40, 3e38, -3e38])


@settings(deadline=None)
@given(
    st.lists(AWKWARD | st.floats(width=32, allow_nan=False, min_value=-8, max_value=8), min_size=1, max_size=200),
    st.data(),
)
def test_candidates_come_by_logit_then_by_id(row, data):
    count = data.draw(st.integers(1, len(row)))
    values = np.array(row, np.float32)
    expected = np.lexsort((np.arange(len(row)), -values.astype(np.float64)))[:count]
    logits = torch.from_numpy(values)[None]
    for top in (sample.top_candidates.reference, cpu.top_candidates):
        found = top(logits, count=count)
        assert found.token_ids[0].tolist() == expected.tolist()
        assert found.logits[0].tolist() == values[expected].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 40, 300, 5003])
def test_the_cpu_candidates_equal_the_reference(dtype, count):
    logits = (torch.randn(6, 5003, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    logits[1] = logits[1].round()  # many ties
    logits[2, 30:] = -math.inf
    logits[3] = 1.5
    ours, expected = cpu.top_candidates(logits, count=count), sample.top_candidates.reference(logits, count=count)
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert torch.equal(ours.logits, expected.logits)
    assert ours.logits.dtype == expected.logits.dtype == torch.float32


ROW_MAX = {"reference": sample.row_max.reference, "cpu": cpu.row_max} | dict.fromkeys(usable_isas(), row_max_native)


@pytest.mark.parametrize("answer", ROW_MAX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sa1_the_largest_logit_wins_and_ties_go_to_the_lowest_id(answer, dtype):
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[1, 3, 3, 2], [-inf, -inf, -2, -2], [0, nan, 5, nan], [-inf] * 4, [1, inf, 2, inf]]).to(
        dtype
    )
    with using(answer) if answer in usable_isas() else nullcontext():
        best = ROW_MAX[answer](logits)
    assert best.token_ids.tolist() == [1, 2, -1, -1, -1]
    assert best.values[[0, 1, 3, 4]].tolist() == [3, -2, -inf, inf]
    assert best.values[2].isnan()
    assert best.values.dtype == torch.float32


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logit_is_found_wherever_it_is(isa, dtype):
    with using(isa):
        for width in (1, 2, 15, 16, 17, 40, 63):
            logits = -torch.arange(width * width, dtype=torch.float32).remainder(5).view(width, width) - 1
            logits.fill_diagonal_(0)
            apart = torch.cat((logits, logits), 1)[:, :width]
            later = logits.clone()
            later[:, -1] = -0.0  # equal to 0.0
            later[-1, -1] = 0.0
            for given in (logits, logits.t(), apart, later):
                found = row_max_native(given.to(dtype))
                assert torch.equal(found.token_ids, torch.arange(width))
                assert found.values.tolist() == [0.0] * width
            logits[width // 2] = -math.inf
            logits[width // 3, width // 4] = math.nan
            for ours, theirs in zip(row_max_native(logits.to(dtype)), sample.row_max.reference(logits), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_masses_are_rounded_exponentials():
    x = -(torch.linspace(0, 45, 5003, dtype=torch.float64) ** 1.3)
    found, exact = sample.masses(x), x.exp() * 2.0**sample.MASS_BITS
    assert found[0] == 2**sample.MASS_BITS
    assert ((found - exact).abs() <= 0.5 + 1e-12 * exact).all()
    assert torch.equal(torch.from_numpy(cpu.masses(x.numpy())), found)
    assert sample.masses(torch.tensor([-torch.inf, -1e300], dtype=torch.float64)).tolist() == [0, 0]


# --- the cut


def filters(size, **changes):
    """One row's filters, off where nothing is said."""
    values = {"log_min_p": -math.inf, "top_k": size, "top_p": 1.0} | changes
    return {
        name: torch.tensor([value], dtype=None if name == "top_k" else torch.float64) for name, value in values.items()
    }


def _bands(x):
    """A few tokens ahead of crowds that float32 hardly tells apart."""
    return torch.where(x > 3.5, x, (x.sign() - 9) + x * 1e-6)


SHAPES = {
    "wide": lambda x: x * 3,
    "confident": lambda x: torch.where(x > 3.5, x * 6, x),
    "equals": lambda x: (x * 2).round(),
    "all_equal": lambda x: x * 0 - 4,
    "bands": _bands,
    "beyond_float32_apart": lambda x: (x * 1.5e38).clamp(-3e38, 3e38),
    "denormal": lambda x: x * 1e-41,
    "mostly_excluded": lambda x: torch.where(x > 2, x, -math.inf),
}
ASKED = [
    {"top_p": 0.9},
    {"top_p": 1 - 2**-30},
    {"top_p": 1e-9},
    {"top_k": 3},
    {"top_k": 33_000},
    {"log_min_p": math.log(0.02)},
    {"log_min_p": -300.0, "top_p": 0.5},
    {"top_k": 900, "top_p": 0.97},
    {"log_min_p": -6.0, "top_k": 200, "top_p": 0.8},
]


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_cut_is_the_references_in_rows_that_threads_share(isa, shape, dtype):
    size = 33_003  # parts of it for two threads, and no multiple of any vector
    logits = SHAPES[shape](torch.randn(1, size, generator=torch.Generator().manual_seed(8))).to(dtype)
    highest = logits.float().amax(1)
    for i, asked in enumerate(ASKED):
        options = filters(size, **asked)
        temperature = torch.tensor([(0.8, 1.0, 0.01, 40.0)[i % 4]], dtype=torch.float64)
        expected = sample.narrow.reference(logits, highest, temperature, **options)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with using(isa):
                found = narrow_native(logits, highest, temperature, **options)
            assert [x.tolist() for x in found] == [x.tolist() for x in expected], (asked, threads)
    torch.set_num_threads(1)


@pytest.mark.parametrize("isa", usable_isas())
def test_a_row_that_cannot_be_cut_harms_no_other(isa):
    logits = torch.randn(4, 5003, generator=torch.Generator().manual_seed(9))
    logits[0, 7], logits[1], logits[2, 9] = math.nan, -math.inf, math.inf
    options = {name: value.expand(4) for name, value in filters(5003, top_k=40, top_p=0.9).items()}
    temperature = torch.ones(4, dtype=torch.float64)
    with using(isa):
        found = narrow_native(logits, sample.row_max(logits).values, temperature, **options)
        # A best logit that is not the row's own leaves any answer, within the row.
        foreign = narrow_native(logits, torch.tensor([3.0, 1e30, -1e30, -5.0]), temperature, **options)
    rows = slice(3, 4)
    expected = sample.narrow.reference(
        logits[rows], logits[rows].amax(1), temperature[rows], **{name: value[rows] for name, value in options.items()}
    )
    assert [x[rows].tolist() for x in found] == [x.tolist() for x in expected]
    for cut in (found, foreign):
        assert ((cut.token_ids >= 0) & (cut.token_ids < 5003)).all()


# --- penalties


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_sa7_penalties_follow_their_definition(data):
    width = 7
    row = data.draw(st.lists(st.floats(-8, 8, width=32), min_size=width, max_size=width))
    prompt = data.draw(st.lists(st.integers(0, width - 1), max_size=12))
    output = data.draw(st.lists(st.integers(0, width - 1), max_size=12))
    repetition = data.draw(st.floats(0.25, 4))
    frequency, presence = data.draw(st.floats(-2, 2)), data.draw(st.floats(-2, 2))
    bias = data.draw(st.lists(st.just(0.0) | st.just(-math.inf) | st.floats(-8, 8, width=32), min_size=7, max_size=7))
    expected = [before + by for before, by in zip(row, bias, strict=True)]
    for t in set(prompt + output):
        expected[t] = expected[t] / repetition if expected[t] > 0 else expected[t] * repetition
    for t in output:
        expected[t] -= frequency
    for t in set(output):
        expected[t] -= presence
    logits = torch.tensor([row, row], dtype=torch.float32)
    tables = {
        "bias": torch.tensor([[0.0] * width, bias]),
        "in_prompt": torch.zeros(2, width, dtype=torch.bool),
        "output_counts": torch.zeros(2, width, dtype=torch.int32),
    }
    tables["in_prompt"][1, prompt] = True
    tables["output_counts"][1] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=width)
    amounts = {"repetition": repetition, "frequency": frequency, "presence": presence}
    tensors = {name: torch.tensor([value] * 2, dtype=torch.float32) for name, value in amounts.items()}
    rows = torch.tensor([1, 0])
    results = [f(logits, rows, **tables, **tensors) for f in (sample.edit_logits.reference, cpu.edit_logits)]
    torch.testing.assert_close(results[0][0], torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-5)
    assert torch.equal(results[0][1], logits[1])  # a row that is nobody's
    assert torch.equal(*results)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 70])
def test_masks_leave_the_tokens_whose_bit_is_set(size):
    allowed = [{0, size - 1}, set(range(size)), set(range(0, size, 3)), set()]
    words = np.zeros((4, -(-size // 32)), np.uint32)
    for row, ids in enumerate(allowed):
        for i in ids:
            words[row, i // 32] |= np.uint32(1 << i % 32)
    bitmask = torch.from_numpy(words.view(np.int32))
    logits = torch.randn(6, size)
    rows = [2, -1, 0, 0, 3, 1]
    expected = logits.clone()
    for i, row in enumerate(rows):
        for token in range(size):
            if row >= 0 and token not in allowed[row]:
                expected[i, token] = -math.inf
    before = logits.clone()
    for answer in (sample.mask_logits.reference, cpu.mask_logits):
        assert torch.equal(answer(logits, torch.tensor(rows), bitmask), expected)
        assert torch.equal(logits, before)


def test_the_cpu_answers_give_way_to_other_devices():
    logits = torch.empty(2, 5003, device="meta")
    for declared, args, options in (
        (sample.row_max, (logits,), {}),
        (sample.top_candidates, (logits,), {"count": 3}),
        (sample.gumbel_argmax, (logits, logits, logits), {}),
    ):
        assert declared.choose(*args, **options) is declared.reference
