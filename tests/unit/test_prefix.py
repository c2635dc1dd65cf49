"""Names of prefixes: equal content is one object, and nothing else is."""

from __future__ import annotations

import gc
import random
from array import array

import pytest

import rorqual.cache.prefix as prefix_module
from rorqual.cache.block_pool import BlockPool
from rorqual.cache.prefix import PrefixIndex, chain_digest
from tests.engine.test_kv_oracle import V4, Layer, run_workload

BLOCK = 16


def packed(token_ids) -> bytes:
    return array("q", token_ids).tobytes()


def test_pc5_moving_31_between_neighbours_changes_the_digest():
    index, plain = PrefixIndex(), list(range(100, 100 + BLOCK))
    root = index.root("")
    node = index.child(root, plain)
    seen = {node.digest}
    for j in range(BLOCK - 1):
        moved = list(plain)
        moved[j] += 31
        moved[j + 1] -= 1
        other = index.child(root, moved)
        assert other is not node
        seen.add(other.digest)
    assert len(seen) == BLOCK


def test_pc5_order_of_tokens_counts():
    index = PrefixIndex()
    root = index.root("")
    assert index.child(root, [1, 2, 3, 4]).digest != index.child(root, [2, 1, 3, 4]).digest


def test_pc5_children_depend_on_the_parent():
    index = PrefixIndex()
    parents = [index.child(index.root(""), tokens) for tokens in ([1, 2], [1, 3])]
    children = [index.child(parent, [7, 8]) for parent in parents]
    grandchildren = [index.child(child, [9, 9]) for child in children]
    assert children[0] is not children[1]
    assert children[0].digest != children[1].digest
    assert grandchildren[0].digest != grandchildren[1].digest


def test_pc5_where_a_block_ends_counts():
    index = PrefixIndex()
    root = index.root("")
    one = index.child(root, [1, 2, 3, 4])
    two = index.child(index.child(root, [1, 2]), [3, 4])
    assert one is not two
    assert one.digest != two.digest


def test_pc7_salts_are_apart():
    index = PrefixIndex()
    nodes = [index.child(index.root(salt), [1, 2, 3, 4]) for salt in ("", "a", "b", "ab")]
    assert len({node.digest for node in nodes}) == 4
    assert len(set(nodes)) == 4
    assert index.child(index.root("a"), [1, 2, 3, 4]) is nodes[1]


def test_equal_content_is_one_object():
    index = PrefixIndex()
    first = index.child(index.child(index.root("s"), [1, 2]), (3, 4))
    second = index.child(index.child(index.root("s"), (1, 2)), [3, 4])
    assert first is second


def test_nodes_die_with_their_last_holder():
    index = PrefixIndex()
    node = index.child(index.root(""), [1, 2])
    assert len(index._nodes) == 2
    del node
    gc.collect()
    assert len(index._nodes) == 0


def test_parent_lives_as_long_as_its_child():
    index = PrefixIndex()
    node = index.child(index.child(index.root(""), [1, 2]), [3, 4])
    gc.collect()
    assert index.child(index.child(index.root(""), [1, 2]), [3, 4]) is node


def test_digest_never_changes():
    """Frozen, so that digests may be stored or compared between processes."""
    root = chain_digest(b"", b"salt")
    node = chain_digest(root, packed([1, 2, 3, 2**40]))
    assert root.hex() == "3aa394787f34eb230efca0f1e966703d685515731780d34f729eeafa375721f1"
    assert node.hex() == "030917e45245ebda1f9da11284d222ddcc7c9d19edd5ee66ae0be48e41084161"
    index = PrefixIndex()
    assert index.child(index.root("salt"), [1, 2, 3, 2**40]).digest == node


COLLIDING = {"constant": lambda digest: b"\0", "four_bits": lambda digest: bytes([digest[0] & 15])}


@pytest.fixture(params=COLLIDING)
def _colliding_digests(request, monkeypatch):
    monkeypatch.setattr(
        prefix_module, "chain_digest", lambda parent, tokens: COLLIDING[request.param](chain_digest(parent, tokens))
    )


@pytest.mark.usefixtures("_colliding_digests")
def test_pc4_colliding_prefixes_are_never_confused():
    index, pool = PrefixIndex(), BlockPool(40)
    held = []
    for salt in ("", "other"):
        for a in range(4):
            parent = index.child(index.root(salt), [a, a])
            held += [((salt, a), parent), *(((salt, a, b), index.child(parent, [b, b])) for b in range(4))]
    assert len({node for _, node in held}) == len(held) == 40
    blocks = pool.take(40)
    for block, (_, node) in zip(blocks, held, strict=True):
        pool.publish(block, node)
    assert [pool.find(node) for _, node in held] == blocks

    # Evicted and published again under other colliding names: the old names find nothing.
    pool.give_back(blocks)
    again = pool.take(40)
    assert [pool.find(node) for _, node in held] == [None] * 40
    fresh = [index.child(index.root("third"), [a, b]) for a in range(5) for b in range(8)]
    for block, node in zip(again, fresh, strict=True):
        pool.publish(block, node)
    assert [pool.find(node) for _, node in held] == [None] * 40
    assert [pool.find(node) for node in fresh] == again


@pytest.mark.usefixtures("_colliding_digests")
def test_pc4_no_false_hit_in_any_workload():
    """Whole workloads with eviction and preemption, whose model refuses stale and foreign blocks."""
    rng = random.Random(0)
    for seed in range(60):
        run_workload(
            prompts=[[rng.randrange(3) for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(2, 7))],
            block_size=rng.randint(1, 3),
            spare_blocks=rng.randint(0, 8),
            max_num_batched_tokens=rng.randint(2, 9),
            max_num_seqs=rng.randint(1, 5),
            threshold=None,
            layers=rng.choice([[Layer()], [Layer(), Layer(window=3)], V4]),
            enable_prefix_caching=True,
            looks_ahead=seed % 2 == 0,
            seed=seed,
        )
