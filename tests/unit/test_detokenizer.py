from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from rorqual.tokenizer import Tokenizer
from rorqual.tokenizer.parts import TokenizerParts
from tests.unit.tiny_tokenizers import TEXTS, byte_level, sentencepiece_like

LLAMA3 = Tokenizer(TokenizerParts(byte_level("llama-bpe")))
SMOLLM = Tokenizer(TokenizerParts(byte_level("smollm")))
LLAMA2 = Tokenizer(TokenizerParts(sentencepiece_like()))
PREFIX = LLAMA2.encode("x", add_special_tokens=False)
scripts = st.lists(
    st.one_of(
        st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3),  # Hangul
        st.characters(min_codepoint=0x3041, max_codepoint=0x3096),  # Hiragana
        st.sampled_from(["👩‍👩‍👧‍👦", "😀", "🇩🇪", "é", "e\u0301", " ", "  ", "\n", "a", "\ufffd", "\u2581"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
).map("".join)


def stream(tokenizer, ids, *, skip_special_tokens=True):
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    deltas = [detokenizer.push(i) for i in ids]
    return [*deltas, detokenizer.finish()]


def continuation(tokenizer, ids, *, skip_special_tokens=True):
    """What full decoding says that `ids` add to a text that is already there."""
    whole = tokenizer.decode(PREFIX + list(ids), skip_special_tokens=skip_special_tokens)
    assert whole.startswith("x")
    return whole[1:]


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 日本語 삼겹살 é", "A 世世ab", "🐋"])
def test_dt1_characters_split_over_tokens_come_out_whole(text):
    for tokenizer in (LLAMA3, SMOLLM):
        ids = tokenizer.encode(text)
        assert len(ids) >= 3
        deltas = stream(tokenizer, ids)
        assert "".join(deltas) == text == tokenizer.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)
    ids = LLAMA2.encode(text, add_special_tokens=False)
    assert "".join(stream(LLAMA2, ids)) == " " + text


def test_dt2_no_character_is_sent_twice():
    byte = {b: SMOLLM._backend.token_to_id(c) for c, b in zip("ä¸ĸAab", b"\xe4\xb8\x96Aab", strict=True)}
    space = SMOLLM._backend.token_to_id("Ġ")
    world = [byte[0xE4], byte[0xB8], byte[0x96]]
    ids = [byte[ord("A")], space, *world, *world, byte[ord("a")], byte[ord("b")]]
    assert stream(SMOLLM, ids) == ["A", " ", "", "", "世", "", "", "世", "a", "b", ""]
    broken = [byte[ord("A")], *world[:2], byte[ord("a")], *world]  # the character is cut off by an 'a'
    assert stream(SMOLLM, broken) == ["A", "", "", "\ufffda", "", "", "世", ""]


@given(text=scripts, sizes=st.lists(st.integers(1, 4), min_size=1))
def test_dt3_every_chunking_streams_the_full_text(text, sizes):
    for tokenizer, expected in ((LLAMA3, text), (LLAMA2, None)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = tokenizer.detokenizer()
        chunks, at, turn = [], 0, 0
        while at < len(ids):
            size = sizes[turn % len(sizes)]
            chunks.append("".join(detokenizer.push(i) for i in ids[at : at + size]))
            at, turn = at + size, turn + 1
        streamed = "".join(chunks) + detokenizer.finish()
        assert streamed == (continuation(tokenizer, ids) if expected is None else tokenizer.decode(ids))


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 610), max_size=40), skip=st.booleans())
def test_byte_level_stream_equals_decode_for_any_ids(ids, skip):
    for tokenizer in (LLAMA3, SMOLLM):
        streamed = "".join(stream(tokenizer, ids, skip_special_tokens=skip))
        assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_stream_equals_decode_for_any_ids(data, skip):
    anything = st.integers(0, LLAMA2.vocab_size + 3).map(lambda i: [i])
    bytes_ = st.integers(3, 258).map(lambda i: [i])
    utf8 = st.text(max_size=3).map(lambda s: [3 + b for b in s.encode("utf-8", "surrogatepass")])
    ids = [i for part in data.draw(st.lists(st.one_of(anything, bytes_, utf8))) for i in part]
    streamed = "".join(stream(LLAMA2, ids, skip_special_tokens=skip))
    assert streamed == continuation(LLAMA2, ids, skip_special_tokens=skip)


def test_run_of_byte_tokens_is_all_text_or_all_replacement():
    a, e9, c3, a9 = (3 + b for b in (0x61, 0xE9, 0xC3, 0xA9))
    word = PREFIX[-1]
    assert stream(LLAMA2, [c3, a9, word]) == ["", "", "é" + LLAMA2.token_text(word), ""]
    assert stream(LLAMA2, [a, c3, word]) == ["", "", "\ufffd\ufffd" + LLAMA2.token_text(word), ""]
    assert stream(LLAMA2, [a, e9, a, c3]) == ["", "", "\ufffd\ufffd\ufffd", "\ufffd", ""]
    assert stream(LLAMA2, [c3, a9]) == ["", "", "é"]
    assert stream(LLAMA2, [c3, 2, a9]) == ["", "", "", "é"]  # a skipped </s> does not end the run


@pytest.mark.parametrize("text", ["a    b", " a", "\n\n  x", "\t\t\tx\t", "a ", "  ", *TEXTS])
def test_dt6_spaces_are_as_in_full_decoding(text):
    for tokenizer in (LLAMA3, SMOLLM):
        ids = tokenizer.encode(text)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    ids = LLAMA2.encode(text, add_special_tokens=False)
    assert "".join(stream(LLAMA2, ids)) == continuation(LLAMA2, ids)


def test_dt6_text_after_a_prompt_keeps_its_leading_space():
    prompt = LLAMA2.encode("the quick")
    ids = [i for i in LLAMA2.encode("the quick brown fox") if i not in prompt]
    assert LLAMA2.decode(prompt + ids) == LLAMA2.decode(prompt) + "".join(stream(LLAMA2, ids)) == "the quick brown fox"


def test_dt7_special_tokens_are_skipped_or_shown_as_asked():
    for tokenizer, end, other in ((LLAMA3, "<|im_end|>", "<think>"), (LLAMA2, "</s>", None)):
        [end_id] = [i for i in tokenizer.special_token_ids if tokenizer.token_text(i) == end]
        x, y = tokenizer.encode("x", add_special_tokens=False), tokenizer.encode("y", add_special_tokens=False)
        for ids in ([end_id], [*x, end_id], [*x, end_id, *y]):
            assert end not in "".join(stream(tokenizer, ids))
            assert end in "".join(stream(tokenizer, ids, skip_special_tokens=False))
        if other:  # an added token that is not special is text
            ids = tokenizer.encode(f"{other}x")
            assert "".join(stream(tokenizer, ids)) == f"{other}x" == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["<｜end▁of▁turn｜>", "two  spaces", "\n"])
def test_added_token_outside_the_byte_alphabet_is_its_own_text(text):
    backend = byte_level("smollm")
    backend.add_tokens([AddedToken(text, normalized=False)])
    tokenizer = Tokenizer(TokenizerParts(backend))
    ids = tokenizer.encode(f"a{text}b")
    assert backend.token_to_id(text) in ids
    assert "".join(stream(tokenizer, ids)) == f"a{text}b" == tokenizer.decode(ids)


def test_ids_without_a_token_add_nothing():
    assert stream(LLAMA3, [10**6]) == ["", ""]
    assert stream(LLAMA2, [10**6]) == ["", ""]
    assert LLAMA2.token_text(10**6) == LLAMA3.token_text(10**6) == ""


def test_each_answer_has_its_own_stream():
    first, second = SMOLLM.detokenizer(), SMOLLM.detokenizer()
    ids = SMOLLM.encode("世")
    for i in ids[:-1]:
        assert first.push(i) == ""
    assert second.push(SMOLLM.encode("a")[0]) == "a"
    assert first.push(ids[-1]) == "世"


def metaspace_tokenizer():
    backend = sentencepiece_like()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(TokenizerParts(backend))


def test_metaspace_decoder_streams_like_decode():
    tokenizer = metaspace_tokenizer()
    ids = tokenizer.encode("the quick  brown", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(PREFIX + ids)[1:]


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "ByteLevel, Strip"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")]), "ByteFallback, Replace"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]), "Replace, Strip"),
        (
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
            "Replace, Fuse, Strip",
        ),
        (None, "none"),
    ],
)
def test_decoder_that_cannot_be_streamed_is_refused_by_name(decoder, name):
    backend = sentencepiece_like()
    if decoder is None:
        backend = type(backend)(backend.model)
    else:
        backend.decoder = decoder
    tokenizer = Tokenizer(TokenizerParts(backend))
    with pytest.raises(ValueError, match=f"got {name}: .*detokenize=False"):
        tokenizer.detokenizer()


def test_token_text_names_special_tokens_and_replaces_lone_bytes():
    assert [LLAMA2.token_text(i) for i in (0, 1, 2, 3 + 0x41, 3 + 0xE4)] == ["<unk>", "<s>", "</s>", "A", "\ufffd"]
    assert SMOLLM.token_text(SMOLLM._backend.token_to_id("ä")) == "\ufffd"
    assert SMOLLM.token_text(SMOLLM._backend.token_to_id("<|im_end|>")) == "<|im_end|>"
    assert SMOLLM.token_text(SMOLLM.encode(" world")[0]).startswith(" ")
