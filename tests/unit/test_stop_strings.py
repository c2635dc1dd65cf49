from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.tokenizer import StopStrings


def run(stop, pieces, *, include=False):
    """All that is emitted, the hit, and each piece's own result."""
    watcher = StopStrings(stop, include_stop_str_in_output=include)
    results = [watcher.push(piece) for piece in pieces]
    hit = results[-1][1] if results else None
    return "".join(text for text, _ in results) + watcher.finish(), hit, results


def plain(stop, text, *, include):
    """The rule by brute force: look at every longer beginning of the text until one ends in a stop string."""
    for end in range(len(text) + 1):
        if ending := [s for s in stop if text[:end].endswith(s)]:
            hit = max(ending, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


@given(
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=30),
    include=st.booleans(),
)
def test_result_depends_on_the_text_and_not_on_its_split(stop, pieces, include):
    text, hit, _ = run(stop, pieces, include=include)
    assert (text, hit) == plain(stop, "".join(pieces), include=include)


@given(stop=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3), text=st.text("ab", max_size=40))
def test_holds_back_no_more_than_what_could_begin_a_stop_string(stop, text):
    watcher = StopStrings(stop)
    seen = emitted = ""
    for character in text:
        new, hit = watcher.push(character)
        seen, emitted = seen + character, emitted + new
        if hit:
            return
        held = seen[len(emitted) :]
        assert held == "" or any(s.startswith(held) for s in stop)
        assert not any(s.startswith(seen[at:]) for s in stop for at in range(len(emitted)))


def test_stop_string_over_several_pieces_is_never_emitted():
    assert run(["STOP"], ["go S", "T", "O", "P on"])[2] == [("go ", None), ("", None), ("", None), ("", "STOP")]


def test_held_text_comes_out_when_it_turns_out_harmless():
    assert run(["STOP"], ["a S", "TO", "x"])[2] == [("a ", None), ("", None), ("STOx", None)]


def test_finish_gives_what_was_held_back():
    watcher = StopStrings(["</think>"])
    assert watcher.push("x </th") == ("x ", None)
    assert watcher.finish() == "</th"
    assert watcher.finish() == ""


def test_include_emits_the_stop_string_and_nothing_after_it():
    assert run(["."], ["one. two."], include=True)[:2] == ("one.", ".")
    assert run(["END"], ["a E", "ND b"], include=True)[:2] == ("a END", "END")


def test_the_stop_string_that_ends_first_wins():
    assert run(["abcd", "bc"], ["xabcd"])[:2] == ("xa", "bc")
    assert run(["bc", "abcd"], ["x", "ab", "cd"])[:2] == ("xa", "bc")


def test_of_two_that_end_together_the_longest_wins():
    assert run(["b", "ab"], ["xab"])[:2] == ("x", "ab")
    assert run(["ab", "b"], ["xa", "b"])[:2] == ("x", "ab")


def test_after_a_hit_nothing_more_is_emitted():
    watcher = StopStrings(["x"])
    assert watcher.push("ax") == ("a", "x")
    assert watcher.push("more") == ("", "x")
    assert watcher.finish() == ""


def test_without_stop_strings_text_passes_at_once():
    assert run([], ["a", "b"])[2] == [("a", None), ("b", None)]


def test_one_string_is_one_stop_string():
    assert run("ab", ["xab"])[:2] == ("x", "ab")


def test_stop_string_of_characters_beyond_ascii():
    assert run(["世界"], ["你好世", "界!"])[:2] == ("你好", "世界")


@pytest.mark.parametrize("stop", [[""], ["", "x"], ""])
def test_st3_empty_stop_string_is_refused(stop):
    if stop == "":
        stop = [stop]
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(stop)


def test_long_text_costs_no_more_per_piece():
    """The text held is bounded by the longest stop string, so no scan grows with what was emitted."""
    watcher = StopStrings(["a" * 50 + "b"])
    for _ in range(2000):
        watcher.push("aa")
        assert len(watcher._held) <= 50
