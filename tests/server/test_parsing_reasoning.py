"""Thinking is split from the answer, however the text comes."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.server.parsing import ParserFactory, count_reasoning_tokens
from rorqual.server.parsing.reasoning import DeepSeekR1, DeepSeekV3, DeepSeekV4, Qwen3
from tests.server.parsed import content, cut_texts, parse, reasoning, split_everywhere


@pytest.mark.parametrize(
    ("text", "inside", "thought", "answer"),
    [
        ("<think>\nlet me see\n</think>\n\nYes.", False, "let me see", "Yes."),
        ("let me see\n</think>\n\nYes.", True, "let me see", "Yes."),
        ("<think>r</think>a", True, "r", "a"),  # the tag twice: in the prompt and in the answer
        ("\n<think>\nr</think>a", True, "r", "a"),
        ("\n <think>r</think>a", False, "r", "a"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("</think>Yes.", True, "", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("\n\nYes.\n", False, "", "\n\nYes.\n"),
        ("", False, "", ""),
        ("", True, "", ""),
        ("\n", False, "", "\n"),
        ("cut of", True, "cut of", ""),
        ("<think>cut of\n", False, "cut of\n", ""),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("<thi", False, "", "<thi"),
        ("<think", False, "", "<think"),
        ("Use <think> and </think>.", False, "", "Use <think> and </think>."),
        ("<think>a < b </thin> c</think>d</think>\n<think>e", False, "a < b </thin> c", "d</think>\n<think>e"),
        ("<think>\n\n  a\n\nb  \n\n</think>\n  c\n", False, "  a\n\nb  ", "  c\n"),
        ("<think>a</think>\n\n", False, "a", ""),
        ("<think>日本</think>語", False, "日本", "語"),
    ],
)
def test_split(text, inside, thought, answer):
    events = split_everywhere(lambda: Qwen3(starts_inside=inside), text)
    assert (reasoning(events), content(events)) == (thought, answer)


def oracle(text: str, inside: bool) -> tuple[str, str]:
    tag = r"\n*(?:<think>\n*)?" if inside else r"\s*<think>\n*"
    found = re.match(tag + r"(?P<thought>.*?)(?:\n*</think>\n*(?P<answer>.*)|\Z)", text, re.DOTALL)
    return (found["thought"], found["answer"] or "") if found else ("", text)


PIECES = st.sampled_from(
    ["<think>", "</think>", "\n", "\n\n", " ", "<", "</", "think>", "<th", "a", "日本", "<tool_call>"]
)


@given(cut_texts(st.lists(PIECES, max_size=10).map("".join)), st.booleans())
def test_every_text_is_split_as_a_regex_does(text_and_cuts, inside):
    text, cuts = text_and_cuts
    events = parse(Qwen3(starts_inside=inside), text, cuts)
    assert (reasoning(events), content(events)) == oracle(text, inside)


def test_text_is_held_only_while_it_may_be_a_tag():
    parser = Qwen3(starts_inside=False)
    assert not parser.push("<thi")
    assert content(parser.push("s")) == "<this"
    parser = Qwen3(starts_inside=True)
    assert reasoning(parser.push("a </")) == "a "
    assert reasoning(parser.push("b")) == "</b"
    assert not parser.push("</think>")
    assert not parser.push("\n\n")
    assert content(parser.push("c<think")) == "c<think"
    assert parser.done


@pytest.mark.parametrize(
    ("parser", "prompt", "kwargs", "opened"),
    [
        (Qwen3, "<|im_start|>assistant\n", {}, False),
        (Qwen3, "<|im_start|>assistant\n<think>\n", {}, True),
        (Qwen3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", {"enable_thinking": True}, False),
        (Qwen3, "user: what does <think> do?\nassistant:", {}, False),
        (DeepSeekR1, "<｜Assistant｜>", {}, True),
        (DeepSeekR1, "<｜Assistant｜><think>\n", {}, True),
        (DeepSeekR1, "<｜Assistant｜><think>\n\n</think>\n\n", {}, False),
        (DeepSeekV3, "<｜Assistant｜></think>", {"thinking": True}, False),
        (DeepSeekV3, "<｜Assistant｜><think>", {}, True),
        (DeepSeekV3, "<｜Assistant｜>", {}, False),
        (DeepSeekV3, "<｜Assistant｜>", {"thinking": True}, True),
        (DeepSeekV3, "<｜Assistant｜>", {"enable_thinking": True}, True),
        (DeepSeekV4, "<｜Assistant｜>", {}, True),
        (DeepSeekV4, "<｜Assistant｜>", {"thinking": None}, True),
        (DeepSeekV4, "<｜Assistant｜>", {"enable_thinking": False}, False),
    ],
)
def test_the_prompt_says_where_the_answer_begins(parser, prompt, kwargs, opened):
    assert parser.is_opened_by(prompt, kwargs) == opened


def test_a_continued_message_may_be_within_its_thinking():
    assert Qwen3.is_opened_by("<|im_start|>assistant\n<think>\nso far", continues=True)
    assert not Qwen3.is_opened_by("<|im_start|>assistant\n<think>\nso\n</think>\n\nI say", continues=True)
    assert not Qwen3.is_opened_by("<|im_start|>assistant\nI say", continues=True)


def test_by_name():
    names = ParserFactory.names()["reasoning"]
    assert {"qwen3", "deepseek_r1"} <= set(names)
    for name in names:
        parser = ParserFactory.reasoning_parser(name, "prompt <think>\n")
        assert reasoning(parse(parser, "r</think>a")) == "r"
    assert ParserFactory.reasoning_parser(None, "<think>") is None
    with pytest.raises(ValueError, match=r"reasoning-parser must be one of qwen3, .* got 'qwen4'"):
        ParserFactory.reasoning_parser("qwen4", "")


def test_tokens_of_thinking_are_counted():
    assert count_reasoning_tokens([5, 6, 9, 7], end_token_id=9, starts_inside=True) == 3
    assert count_reasoning_tokens([8, 6, 9, 7], end_token_id=9, starts_inside=False) == 3
    assert count_reasoning_tokens([5, 6, 7], end_token_id=9, starts_inside=True) == 3
    assert count_reasoning_tokens([5, 6, 7], end_token_id=9, starts_inside=False) == 0
    assert count_reasoning_tokens([5, 6, 7], end_token_id=None, starts_inside=True) == 0


@pytest.mark.parametrize("char", ["a", "\n", "<"])
def test_long_thinking_is_read_in_linear_time(char):
    def seconds(length: int) -> float:
        parser = Qwen3(starts_inside=True)
        begin = time.process_time()
        for _ in range(length):
            parser.push(char)
        parser.finish()
        return time.process_time() - begin

    short = min(seconds(20_000) for _ in range(3))
    assert seconds(200_000) < 40 * short
