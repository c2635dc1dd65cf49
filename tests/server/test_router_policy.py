"""Which replica gets a request: prefixes, sessions, load, and what of a request they are read from."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.server.router.policy import Balancer, Replica
from rorqual.server.router.prefix_index import BLOCK_CHARACTERS, BLOCK_TOKENS, MOST_BLOCKS, SentPrefixes, blocks_of
from rorqual.server.router.prompt import Wanted, wanted
from rorqual.server.router.settings import RoutingSettings

TEXT = "".join(random.Random(0).choices("abcdefgh ", k=20 * BLOCK_CHARACTERS))


def balancer(count=3, **settings):
    chosen = RoutingSettings(**settings)
    replicas = [Replica(f"http://r{i}", chosen) for i in range(count)]
    for replica in replicas:
        replica.is_healthy = True
    return Balancer(replicas, chosen), replicas


def prompt(text):
    return Wanted(blocks=blocks_of(text, ""))


# --- the index


def test_equal_beginnings_have_equal_blocks():
    other = TEXT[: 5 * BLOCK_CHARACTERS + 7] + "#" + TEXT[5 * BLOCK_CHARACTERS + 8 :]
    one, two = blocks_of(TEXT, "seed"), blocks_of(other, "seed")
    assert len(one) == len(two) == 20
    assert one[:5] == two[:5]
    assert not set(one[5:]) & set(two[5:])  # each block tells of all before it
    assert not set(one) & set(blocks_of(TEXT, "another seed"))
    ids = list(range(3 * BLOCK_TOKENS + 5))
    assert len(blocks_of(ids, "")) == 3
    assert blocks_of("short", "") == []
    assert len(blocks_of("x" * (MOST_BLOCKS + 10) * BLOCK_CHARACTERS, "")) == MOST_BLOCKS


def test_the_newest_prompts_are_kept_and_of_an_old_one_its_beginning():
    index = SentPrefixes(30)
    first, second = blocks_of(TEXT, 1), blocks_of(TEXT, 2)
    index.add(first)
    assert index.match(first) == 20
    index.add(second)
    assert len(index) == 30
    assert (index.match(first), index.match(second)) == (10, 20)
    index.add(first[:3])
    index.add(blocks_of(TEXT, 3))
    assert (index.match(first), index.match(second)) == (3, 7)
    index.clear()
    assert index.match(first) == 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=20), st.integers(1, 12))
def test_what_matches_is_what_a_search_from_the_beginning_finds(prompts, capacity):
    index = SentPrefixes(capacity)
    chains = []
    for choices in prompts:
        chain = [0]
        for choice in choices:
            chain.append(hash((chain[-1], choice)))
        chains.append(chain[1:])
    for chain in chains:
        index.add(chain)
        assert len(index) <= capacity
        for other in chains:
            found = 0
            while found < len(other) and other[found] in index._hashes:
                found += 1
            assert index.match(other) == found
            assert not any(block in index._hashes for block in other[found:])


# --- the choice


def test_without_prefixes_requests_go_round():
    chooser, replicas = balancer()
    assert [chooser.choose(Wanted()) for _ in range(6)] == replicas * 2
    assert [replica.choices["load"] for replica in replicas] == [2, 2, 2]


def test_the_least_busy_one_is_chosen():
    chooser, replicas = balancer()
    replicas[0].num_running, replicas[1].num_foreign, replicas[2].num_running = 3, 5, 2
    assert chooser.choose(Wanted()) is replicas[2]


def test_a_prompt_goes_where_its_beginning_went():
    chooser, replicas = balancer()
    first = chooser.choose(prompt(TEXT))
    for other in replicas:
        other.num_running = 0 if other is not first else 10  # less than 16 above the others
    assert chooser.choose(prompt(TEXT[: 10 * BLOCK_CHARACTERS] + TEXT)) is first
    assert first.choices == {"load": 1, "prefix": 1}
    assert chooser.choose(prompt(TEXT[5:])) is not first


def test_the_longest_match_wins_and_of_equal_ones_the_less_busy():
    chooser, (a, b, c) = balancer()
    a.prefixes.add(prompt(TEXT[: 8 * BLOCK_CHARACTERS]).blocks)
    b.prefixes.add(prompt(TEXT[: 12 * BLOCK_CHARACTERS]).blocks)
    b.num_running = 5
    assert chooser.choose(prompt(TEXT)) is b
    c.prefixes.add(prompt(TEXT).blocks)
    assert chooser.choose(prompt(TEXT)) is c


def test_too_short_a_match_counts_for_nothing():
    chooser, (a, b, _) = balancer(cache_threshold=0.5)
    b.prefixes.add(prompt(TEXT[: 9 * BLOCK_CHARACTERS]).blocks)
    b.num_running = 1
    assert chooser.choose(prompt(TEXT)) is a
    b.prefixes.add(prompt(TEXT[: 10 * BLOCK_CHARACTERS]).blocks)
    a.prefixes.clear()
    assert chooser.choose(prompt(TEXT)) is b


@pytest.mark.parametrize(
    ("busy", "least", "stays"),
    [(16, 0, True), (17, 0, False), (116, 100, True), (150, 100, True), (151, 100, False)],
)
def test_a_match_does_not_win_over_much_more_load(busy, least, stays):
    chooser, (a, b) = balancer(2)
    a.prefixes.add(prompt(TEXT).blocks)
    a.num_running, b.num_running = busy, least
    chosen = chooser.choose(prompt(TEXT))
    assert chosen is (a if stays else b)
    assert chosen.choices == {"prefix" if stays else "load": 1}
    assert chosen.prefixes.match(prompt(TEXT).blocks) == 20  # where it went it is known now


def test_a_session_stays_while_its_replica_lives():
    chooser, replicas = balancer()
    first = chooser.choose(Wanted(session="s"))
    first.num_running = 1000
    assert all(chooser.choose(Wanted(session="s")) is first for _ in range(3))
    assert chooser.choose(Wanted(session="t")) is not first
    first.is_healthy = False
    second = chooser.choose(Wanted(session="s"))
    assert second in replicas
    assert second is not first
    first.is_healthy, first.num_running = True, 0
    assert chooser.choose(Wanted(session="s")) is second


def test_a_response_wins_over_a_session():
    chooser, (a, b, _) = balancer()
    assert chooser.choose(Wanted(session="s")) is a
    chooser.note_response("resp_1", b)
    assert chooser.choose(Wanted(session="s", response_id="resp_1")) is b
    assert chooser.owner("resp_1") is b
    chooser.forget(b)
    assert chooser.owner("resp_1") is None


def test_replicas_that_are_not_healthy_or_have_failed_are_not_chosen():
    chooser, (a, b, c) = balancer()
    a.is_healthy = False
    assert chooser.choose(Wanted(), without=[b]) is c
    assert chooser.choose(Wanted(), without=[b, c]) is None


# --- what is read


def asked(body, path="/v1/completions", headers=None, method="POST"):
    return wanted(method, path, headers or {}, json.dumps(body).encode())


def test_prompts_of_completions():
    by_text = asked({"prompt": TEXT}).blocks
    assert len(by_text) == 20
    assert asked({"prompt": [TEXT, "another"]}).blocks == by_text
    assert asked({"prompt": TEXT, "model": "m"}).blocks != by_text
    assert asked({"prompt": TEXT, "cache_salt": "m"}).blocks != by_text
    ids = list(range(100))
    assert len(asked({"prompt": ids}).blocks) == 3
    assert asked({"prompt": [ids, [1]]}).blocks == asked({"prompt": ids}).blocks
    assert asked({"prompt": [True] * 100}).blocks == []


def test_a_chat_begins_as_the_one_that_it_goes_on_from():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"description": TEXT[:300]}}}]
    turns = [{"role": "system", "content": TEXT[:500]}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": TEXT[:400]}}]}
    later = [*turns, call, {"role": "tool", "content": TEXT[:700], "tool_call_id": "1"}]
    chat = "/v1/chat/completions"
    before, after = (asked({"messages": messages, "tools": tools}, chat).blocks for messages in (turns, later))
    assert len(before) >= 6
    assert after[: len(before)] == before
    assert len(after) > len(before) + 7
    assert asked({"messages": turns}, chat).blocks[0] != before[0]  # tools come first
    assert asked({"messages": [{**turns[0], "role": "user"}, *turns[1:]], "tools": tools}, chat).blocks != before


def test_responses_are_read_like_chats():
    given = [{"role": "user", "content": TEXT[:600]}]
    one = asked({"input": TEXT[:600], "instructions": TEXT[-300:]}, "/v1/responses")
    assert one.makes_response
    assert len(one.blocks) == 7
    assert asked({"input": given, "instructions": TEXT[-300:]}, "/v1/responses").blocks == one.blocks
    assert asked({"input": "x", "previous_response_id": "resp_1"}, "/v1/responses").response_id == "resp_1"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        assert asked({}, f"/v1/responses/resp_2{path}", method=method).response_id == "resp_2"


def test_sessions():
    assert asked({}).session is None
    assert asked({"user": "u"}).session == "u"
    assert asked({"user": "u", "prompt_cache_key": "k"}).session == "k"
    assert asked({"user": "u", "prompt_cache_key": "k", "session_id": "s"}).session == "s"
    assert asked({"session_id": "s"}, headers={b"x-session-id": b"h"}).session == "h"
    assert asked({"user": 5}).session is None
    assert asked({"user": "u" * 10_000}).session == "u" * 256
    assert wanted("GET", "/v1/models", {b"x-session-id": b"h"}, b"").session == "h"


NOT_READ = [
    *(b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": {"a": 1}}'),
    *(b'{"messages": 5, "tools": 7}', b'{"messages": [1, null, {"content": 5}, {"content": [1, {"x": 2}]}]}'),
    *(b'{"input": {"a": []}}', b'{"messages": [{"x": ' + b"[" * 900 + b"]" * 900 + b"}]}"),
]


@pytest.mark.parametrize("body", NOT_READ)
def test_what_cannot_be_read_says_nothing_and_breaks_nothing(body):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
        assert wanted("POST", path, {}, body).session is None
