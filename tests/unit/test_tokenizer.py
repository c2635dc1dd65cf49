from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from rorqual.tokenizer import Tokenizer
from tests.unit.tiny_tokenizers import SHAPES, TEXTS, byte_level, save, sentencepiece_like


def assert_same(ours, theirs, texts=TEXTS):
    """Equal ids and texts, ours and transformers'."""
    for text in texts:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


@pytest.mark.parametrize("shape", SHAPES)
def test_byte_level_ids_equal_transformers(shape, tmp_path):
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    folder = save(byte_level(shape, bos="<s>"), tmp_path, config)
    assert_same(Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder))


def test_qwen_like_ids_equal_transformers_own_class(tmp_path):
    config = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<s>"}
    folder = save(byte_level("qwen2"), tmp_path, config)
    ours = Tokenizer.from_folder(folder)
    assert_same(ours, AutoTokenizer.from_pretrained(folder))
    assert ours.bos_token_id is None


def test_sentencepiece_like_ids_equal_transformers(tmp_path):
    folder = save(sentencepiece_like(), tmp_path, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    assert_same(Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("bos", [None, "<s>"])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("add_eos_token", [None, True])
def test_add_bos_token_and_post_processor_count_as_in_transformers(bos, add_bos_token, add_eos_token, tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos_token, "add_eos_token": add_eos_token}
    config = {key: value for key, value in config.items() if value is not None}
    folder = save(byte_level("llama-bpe", bos=bos), tmp_path, config)
    assert_same(Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder), ["", "hello"])


def test_tokens_known_only_to_the_config_are_added_as_in_transformers(tmp_path):
    backend = byte_level("qwen2")
    first = backend.get_vocab_size(with_added_tokens=True)
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|eot|>", "lstrip": False, "rstrip": False, "special": True},
        "additional_special_tokens": ["<|tool|>", "</think>"],
        "added_tokens_decoder": {
            str(first): {"content": "<|eot|>", "special": True, "normalized": False},
            str(first + 1): {"content": "<|plain|>", "special": False, "normalized": False, "rstrip": True},
        },
    }
    folder = save(backend, tmp_path, config)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert_same(ours, theirs, ["a<|eot|>b<|plain|>  c<|tool|></think>d"])
    assert ours.eos_token_ids == (first,)


def test_added_token_under_another_id_is_refused(tmp_path):
    config = {"added_tokens_decoder": {"9999": {"content": "<|new|>", "special": True}}}
    with pytest.raises(ValueError, match=r"'<\|new\|>' is 9999, got"):
        Tokenizer.from_folder(save(byte_level("qwen2"), tmp_path, config))


def test_special_tokens_map_is_read_as_in_transformers(tmp_path):
    folder = save(byte_level("qwen2"), tmp_path)
    special = {
        "bos_token": {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False},
        "eos_token": "</s>",
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    ours = Tokenizer.from_folder(folder)
    assert_same(ours, AutoTokenizer.from_pretrained(folder))
    assert (ours.bos_token_id, ours.eos_token_ids) == (3, (4,))


def test_folder_with_tokenizer_json_alone_works(tmp_path):
    backend = byte_level("smollm")
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_ids) == (None, ())
    assert ours.encode("hello 12") == backend.encode("hello 12").ids


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    backend = byte_level("smollm")
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    ours = Tokenizer.from_folder(save(backend, tmp_path))
    assert ours.encode("hello world, hello world") == byte_level("smollm").encode("hello world, hello world").ids


def test_special_tokens_written_out_become_their_ids(tmp_path):
    ours = Tokenizer.from_folder(save(byte_level("smollm"), tmp_path))
    assert ours.encode("<|im_start|><|im_end|>") == [1, 2]


def test_ids_without_a_token_decode_to_nothing(tmp_path):
    ours = Tokenizer.from_folder(save(byte_level("smollm"), tmp_path))
    assert ours.decode([10**6, *ours.encode("a")]) == "a"


@pytest.mark.parametrize("text", ["a\ud800b", 5])
def test_what_is_no_valid_text_is_refused(text, tmp_path):
    ours = Tokenizer.from_folder(save(byte_level("smollm"), tmp_path))
    with pytest.raises(ValueError, match="text in valid Unicode"):
        ours.encode(text)


def test_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must have a tokenizer\.json or a tokenizer\.model, got neither"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"model": {"type": "Nonsense"}}'])
def test_broken_tokenizer_json_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_tokenizer_config_is_refused(content, tmp_path):
    folder = save(byte_level("smollm"), tmp_path)
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must be"):
        Tokenizer.from_folder(folder)


# tokenizer.model


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def sentencepiece_folder(request, tmp_path_factory):
    """A real SentencePiece BPE model, trained as Llama 2's was."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from tests.unit.tiny_tokenizers import CORPUS

    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS[:3] for line in text.splitlines()),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return folder


def plain_texts():
    return [text for text in TEXTS if "<s>" not in text]  # SentencePiece itself does not know control tokens in text


def test_tokenizer_model_gives_sentencepieces_own_ids(sentencepiece_folder):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    ours = Tokenizer.from_folder(sentencepiece_folder)
    for text in plain_texts():
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [theirs.bos_id(), *ids]
        assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_id(), (theirs.eos_id(),))
    assert ours.vocab_size == theirs.vocab_size()


def test_tokenizer_model_keeps_special_and_user_defined_tokens_whole(sentencepiece_folder):
    ours = Tokenizer.from_folder(sentencepiece_folder)
    assert ours.encode("<s></s><tool>", add_special_tokens=False) == [1, 2, 3]
    assert ours.decode([1, 2, 3]) == "<tool>"


def test_add_bos_token_of_the_config_counts_for_a_tokenizer_model(sentencepiece_folder, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folder / "tokenizer.model").read_bytes())
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("a") == [*ours.encode("a", add_special_tokens=False), 2]


def test_added_tokens_json_extends_a_tokenizer_model(sentencepiece_folder, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folder / "tokenizer.model").read_bytes())
    (tmp_path / "added_tokens.json").write_text('{"[PAD]": 420}')
    assert Tokenizer.from_folder(tmp_path).encode("[PAD]", add_special_tokens=False) == [420]


def test_normalization_of_a_tokenizer_model_is_applied(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "ABC abc 123"]),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.from_folder(tmp_path)
    for text in ["ＡＢＣ  abc", "  the   fox ", "①"]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_unigram_tokenizer_model_is_refused(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "jumps over"]),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="unigram",
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match=r"type BPE .* got type 1"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00", b"not a model at all", b"\x0a\xff\xff\xff\xff", b"\x0a\x02\x08\x01"])
def test_broken_tokenizer_model_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match="must be a SentencePiece model"):
        Tokenizer.from_folder(tmp_path)


def test_token_flagged_plain_but_named_eos_is_special(tmp_path):
    backend: Backend = byte_level("smollm")
    backend.add_tokens([AddedToken("<eot>", normalized=False)])
    folder = save(backend, tmp_path, {"eos_token": "<eot>"})
    ours = Tokenizer.from_folder(folder)
    assert ours.decode(ours.encode("a<eot>")) == "a"
    assert_same(ours, AutoTokenizer.from_pretrained(folder), ["a<eot>b"])
