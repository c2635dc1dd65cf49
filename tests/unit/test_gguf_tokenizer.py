from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from rorqual.tokenizer import Tokenizer
from rorqual.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.unit.tiny_tokenizers import SHAPES, TEXTS, byte_level, gguf_metadata, save, sentencepiece_like


def both(backend, folder, **gguf):
    """The same tokenizer through tokenizer.json and through GGUF metadata."""
    folder = save(backend, folder, {"bos_token": "<s>", "eos_token": "</s>"})
    ids = {"bos_token_id": backend.token_to_id("<s>"), "eos_token_id": backend.token_to_id("</s>")}
    return Tokenizer.from_folder(folder), Tokenizer.from_gguf(gguf_metadata(backend, **ids, **gguf))


@pytest.mark.parametrize("shape", SHAPES)
def test_lo9_same_ids_through_tokenizer_json_and_gguf(shape, tmp_path):
    bos = "<s>" if shape in {"llama-bpe", "tekken"} else None  # what llama.cpp assumes when the file does not say
    folder, gguf = both(byte_level(shape, bos=bos), tmp_path, pre=shape)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = folder.encode(text, add_special_tokens=add_special_tokens)
            assert gguf.encode(text, add_special_tokens=add_special_tokens) == ids
        for skip in (True, False):
            decoded = folder.decode(ids, skip_special_tokens=skip)
            assert gguf.decode(ids, skip_special_tokens=skip) == decoded
    assert gguf.special_token_ids == folder.special_token_ids
    assert gguf.vocab_size == folder.vocab_size
    assert (gguf.bos_token_id, gguf.eos_token_ids[:1]) == (folder.bos_token_id, folder.eos_token_ids)


def test_lo9_same_ids_for_sentencepiece(tmp_path):
    folder, gguf = both(sentencepiece_like(), tmp_path)
    for text in TEXTS:
        ids = folder.encode(text)
        assert gguf.encode(text) == ids
        assert ids[0] == 1
        assert gguf.decode(ids) == folder.decode(ids)
        assert gguf.encode(text, add_special_tokens=False) == ids[1:]
    assert gguf.special_token_ids == folder.special_token_ids == {0, 1, 2}
    assert gguf.vocab_size == folder.vocab_size


@settings(max_examples=200)
@given(text=st.text(max_size=40))
def test_lo9_same_ids_for_any_text(text):
    for shape in ("smollm", "qwen2", "llama-bpe"):
        backend = _SHAPED[shape]
        assert _FROM_GGUF[shape].encode(text, add_special_tokens=False) == backend.encode(text).ids
    backend = _SHAPED["llama"]
    assert _FROM_GGUF["llama"].encode(text) == backend.encode(text).ids


_SHAPED = {shape: byte_level(shape) for shape in ("smollm", "qwen2", "llama-bpe")} | {"llama": sentencepiece_like()}
_FROM_GGUF = {
    shape: Tokenizer.from_gguf(gguf_metadata(backend, pre=None if shape == "llama" else shape, bos_token_id=1))
    for shape, backend in _SHAPED.items()
}


@pytest.mark.parametrize("shape", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_keeps_the_text(shape):
    tokenizer = Tokenizer.from_gguf(gguf_metadata(byte_level("gpt-2"), pre=shape, bos_token_id=3))
    for text in TEXTS:
        ids = tokenizer.encode(text.replace("\u0301", ""), add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("\u0301", "")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "a 123  b", ["a", " 123", " ", " b"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("starcoder", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "a 12345 It'S", ["a", " ", "123", "45", " It", "'S"]),
        ("qwen2", "a 12\n\n", ["a", " ", "1", "2", "\n\n"]),
        ("qwen35", "x\u0301y", ["x\u0301y"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-v3", "日本abc 1234 .net", ["日本", "abc", " ", "123", "4", " .", "net"]),
        ("deepseek-coder", "a 12\r\n", ["a", " ", "1", "2", "\r", "\n"]),
        ("default", "a 12345, b", ["a", " ", "123", "45", ",", " b"]),
    ],
)
def test_pre_tokenizer_cuts_words_as_its_model_does(pre, text, words):
    pieces = PRE_TOKENIZERS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in pieces] == words


@pytest.mark.parametrize(
    ("flags", "first", "last"),
    [
        ({}, None, None),
        ({"add_bos_token": True}, 3, None),
        ({"add_bos_token": True, "add_eos_token": True}, 3, 4),
        ({"add_bos_token": False, "add_eos_token": True}, None, 4),
    ],
)
def test_lo9_add_bos_and_add_eos_are_honoured(flags, first, last):
    backend = byte_level("smollm")
    tokenizer = Tokenizer.from_gguf(gguf_metadata(backend, pre="smollm", bos_token_id=3, eos_token_id=4, **flags))
    plain = backend.encode("hello").ids
    expected = [*([first] if first else []), *plain, *([last] if last else [])]
    assert tokenizer.encode("hello") == expected
    assert tokenizer.encode("hello", add_special_tokens=False) == plain


def test_lo9_add_bos_false_wins_over_the_model_kind():
    llama3 = gguf_metadata(byte_level("llama-bpe"), pre="llama-bpe", bos_token_id=3)
    assert Tokenizer.from_gguf(llama3).encode("x")[0] == 3
    assert Tokenizer.from_gguf(llama3 | {"tokenizer.ggml.add_bos_token": False}).encode("x")[0] != 3
    llama2 = gguf_metadata(sentencepiece_like())
    assert Tokenizer.from_gguf(llama2).encode("x")[0] == 1
    assert Tokenizer.from_gguf(llama2 | {"tokenizer.ggml.add_bos_token": False}).encode("x")[0] != 1


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_word_that_is_a_token_needs_no_merges_where_the_model_says_so(pre, whole):
    metadata = gguf_metadata(byte_level(pre), pre=pre, merges=["h e"])
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (len(tokenizer.encode(" quick")) == 1) is whole
    assert tokenizer.decode(tokenizer.encode(" quick")) == " quick"


def test_bos_with_a_colon_in_its_text_is_added():
    backend = byte_level("smollm")
    backend.add_special_tokens([AddedToken("<a:b> c", normalized=False)])
    bos = backend.token_to_id("<a:b> c")
    metadata = gguf_metadata(backend, pre="smollm", bos_token_id=bos, add_bos_token=True)
    assert Tokenizer.from_gguf(metadata).encode("x")[0] == bos


def test_add_space_prefix_false_adds_no_space():
    metadata = gguf_metadata(sentencepiece_like(), add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    assert not tokenizer.token_text(tokenizer.encode("the fox")[0]).startswith(" ")
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_user_defined_tokens_stay_whole_and_are_text():
    metadata = gguf_metadata(byte_level("qwen2"), pre="qwen2")
    tokenizer = Tokenizer.from_gguf(metadata)
    [token_id] = tokenizer.encode("<think>")
    assert metadata["tokenizer.ggml.token_type"][token_id] == 4
    assert token_id not in tokenizer.special_token_ids
    assert tokenizer.decode([token_id]) == "<think>"


def test_user_defined_piece_of_sentencepiece_is_found_in_plain_text():
    metadata = gguf_metadata(sentencepiece_like())
    metadata["tokenizer.ggml.tokens"].append("▁▁▁▁")
    metadata["tokenizer.ggml.token_type"].append(4)
    metadata["tokenizer.ggml.scores"].append(-2000.0)
    tokenizer = Tokenizer.from_gguf(metadata)
    four = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert four in tokenizer.encode("x    y")
    assert tokenizer.decode(tokenizer.encode("x    y")) == "x     y"  # what stands after a whole token is prefixed


def test_turn_ends_are_eos_eot_and_eom_each_once():
    metadata = gguf_metadata(byte_level("smollm"), pre="smollm", eos_token_id=4, eot_token_id=2, eom_token_id=4)
    assert Tokenizer.from_gguf(metadata).eos_token_ids == (4, 2)


def test_turn_end_is_known_by_its_text_in_old_files():
    metadata = gguf_metadata(byte_level("smollm"), pre="smollm", eos_token_id=0)
    assert Tokenizer.from_gguf(metadata).eos_token_ids == (0, 2)  # <|endoftext|> as named, <|im_end|> by its text


def test_turn_end_that_the_file_calls_normal_is_special_all_the_same():
    metadata = gguf_metadata(byte_level("smollm"), pre="smollm", eos_token_id=2)
    metadata["tokenizer.ggml.token_type"][2] = 1
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2]) == ""


def test_named_chat_templates_are_read():
    metadata = gguf_metadata(byte_level("smollm"), pre="smollm") | {
        "tokenizer.chat_template": "default {{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools {{ messages[0].content }}",
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    hi = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(hi) == "default hi"
    assert tokenizer.render_chat(hi, tools=[{"type": "function"}]) == "tools hi"


def test_empty_token_text_gets_a_name():
    metadata = gguf_metadata(byte_level("smollm"), pre="smollm")
    metadata["tokenizer.ggml.tokens"].append("")
    metadata["tokenizer.ggml.token_type"].append(5)
    assert Tokenizer.from_gguf(metadata).vocab_size == len(metadata["tokenizer.ggml.tokens"])


def test_missing_pre_tokenizer_is_warned_about(caplog):
    metadata = gguf_metadata(byte_level("gpt-2"), pre="gpt-2")
    del metadata["tokenizer.ggml.pre"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.decode(tokenizer.encode("a 12345")) == "a 12345"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "must be one of gpt2, llama, got 't5'.*--tokenizer"),
        ({"pre": "martian"}, "must be one of default, gpt-2.*smollm.*got 'martian'.*--tokenizer"),
        ({"model": None}, "must have tokenizer.ggml.model"),
        ({"tokens": None}, "must have tokenizer.ggml.tokens"),
        ({"merges": None}, "must have tokenizer.ggml.merges"),
        ({"token_type": [1]}, "one entry per token"),
        ({"merges": ["zzz yyy"]}, "got 'zzz yyy'"),
        ({"merges": ["z #"]}, "got 'z #'"),
        ({"eos_token_id": 10**6}, "eos_token_id must be an id below"),
        ({"add_bos_token": True}, "add_bos_token needs tokenizer.ggml.bos_token_id"),
    ],
)
def test_lo9_unknown_or_broken_metadata_is_refused(change, message):
    metadata = gguf_metadata(byte_level("gpt-2"), pre="gpt-2")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata)


def test_repeated_token_is_refused():
    metadata = gguf_metadata(byte_level("gpt-2"), pre="gpt-2")
    metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][0]
    with pytest.raises(ValueError, match=r"got '<\|endoftext\|>' twice"):
        Tokenizer.from_gguf(metadata)


def test_scores_of_another_length_are_refused():
    with pytest.raises(ValueError, match="scores must have one entry per token"):
        Tokenizer.from_gguf(gguf_metadata(sentencepiece_like(), scores=[0.0]))


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2_path):
    from rorqual.loader.gguf import read_metadata

    return read_metadata(smollm2_path)


@pytest.fixture(scope="module")
def smollm2(smollm2_metadata):
    return Tokenizer.from_gguf(smollm2_metadata)


def test_lo9_smollm2_ids_are_those_of_its_tokenizer_json(smollm2, smollm2_metadata):
    tokens = smollm2_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm2_metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = SHAPES["smollm"]["pre_tokenizer"]
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:17])
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert smollm2.encode(text) == ids
        assert smollm2.decode(ids) == backend.decode(ids)


@pytest.mark.slow
def test_lo9_smollm2_ids_equal_transformers_but_for_digits(smollm2, smollm2_path):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    without_digits = [text for text in TEXTS if not any(c.isnumeric() for c in text)]
    assert len(without_digits) > 10
    for text in without_digits:
        assert smollm2.encode(text) == theirs.encode(text)
        assert smollm2.decode(smollm2.encode(text)) == theirs.decode(smollm2.encode(text), skip_special_tokens=True)


def test_lo9_smollm2_splits_every_digit_and_keeps_special_tokens(smollm2):
    digits = smollm2.encode("1234", add_special_tokens=False)
    assert [smollm2.token_text(i) for i in digits] == list("1234")
    assert smollm2.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, (2,), 49152)
    assert 1 not in smollm2.encode("hello")  # add_bos_token is false in this file


def test_smollm2_chat_prompt_is_the_models_own(smollm2):
    assert smollm2.render_chat([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_is_built_quickly(smollm2_metadata):
    times = []
    for _ in range(3):
        start = time.perf_counter()
        Tokenizer.from_gguf(smollm2_metadata)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0  # a tenth of a second on an idle laptop core
