"""The engine in its own process answers as it does in this one, and what clients do there hurts nobody."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rorqual import LLM, SamplingParams
from rorqual.outputs import CompletionOutput, RequestOutput
from rorqual.server import engine_process
from rorqual.server.engine_client import RequestRefused
from rorqual.server.frames import FrameReader, pack
from rorqual.server.messages import (
    Abort,
    Completion,
    Delta,
    Deltas,
    Finished,
    FromEngine,
    Shutdown,
    Submit,
    TokenLogprob,
)
from rorqual.server.process_client import ProcessEngineClient, ProcessRequestHandle, merged
from tests.engine.engines import TINY_OPTIONS, ScriptedRunner, byte_tokenizer, tiny_llm
from tests.server import scripted_engine
from tests.tiny import VOCAB, checkpoint_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 20},
    "greedy, no max_tokens": {"temperature": 0},
    "seeded": {"seed": 7, "max_tokens": 20},
    "a large seed": {"seed": 2**64 - 1, "max_tokens": 5},
    "n": {"n": 3, "seed": 3, "max_tokens": 12},
    "stop": {"seed": 11, "max_tokens": 24, "stop": ["a", "bc", "&"], "ignore_eos": True},
    "stop kept": {"seed": 11, "max_tokens": 24, "stop": ["a", "&"], "include_stop_str_in_output": True},
    "stop tokens": {"seed": 12, "max_tokens": 24, "stop_token_ids": [5, 50, 90, 120], "ignore_eos": True},
    "logprobs": {"temperature": 0, "max_tokens": 6, "logprobs": 3},
    "prompt logprobs": {"seed": 4, "max_tokens": 3, "logprobs": 0, "prompt_logprobs": 2},
    "a changed distribution": {
        "seed": 5,
        "max_tokens": 12,
        "logit_bias": {50: 3.5, 60: -100},
        "allowed_token_ids": list(range(2, 150)),
        "bad_words": ["ab"],
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "min_tokens": 4,
    },
    "no text": {"seed": 6, "max_tokens": 5, "detokenize": False},
}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("server") / "model"
    shutil.copytree(checkpoint_folder("llama"), folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return TINY_OPTIONS | {"model": str(folder), "skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def llm(options):
    with tiny_llm(**{key: value for key, value in options.items() if key != "model"}, tokenizer=options["model"]) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(options):
    """An engine in a process; steps take 2 ms or more, so that there is a middle to be in."""
    one = await ProcessEngineClient.start(options | {"step_s": 0.002}, command=scripted_engine.COMMAND)
    await one.wait_ready()
    yield one
    assert one.state == "ready", one.failure
    await one.close()
    assert one._process.returncode == 0


_NUMBERS = itertools.count()


def submit(client: ProcessEngineClient, ids: list[int], *, streamed: bool = True, **options: Any):
    return client.submit(ids, SamplingParams(**options), request_id=f"test-{next(_NUMBERS)}", streamed=streamed)


async def read(handle: ProcessRequestHandle) -> tuple[list[Delta], Finished]:
    *deltas, finished = [item async for item in handle]
    assert isinstance(finished, Finished)
    assert all(isinstance(delta, Delta) for delta in deltas)
    return deltas, finished


async def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not become true"
        await asyncio.sleep(0.01)


def assert_same_logprobs(got, expected) -> None:
    """The same candidates in the same order; logits may differ in their last bits, as batches do."""
    assert (got is None) == (expected is None)
    for candidates, entry in zip(got or (), expected or (), strict=True):
        assert (candidates is None) == (entry is None)
        if candidates is not None:
            assert [(c.token_id, c.rank, c.text) for c in candidates] == [
                (token_id, logprob.rank, logprob.decoded_token) for token_id, logprob in entry.items()
            ]
            assert [c.logprob for c in candidates] == pytest.approx([e.logprob for e in entry.values()], abs=1e-4)


def assert_same_answer(got: Completion, expected: CompletionOutput) -> None:
    fields = ("index", "text", "token_ids", "finish_reason", "stop_reason", "error")
    assert [getattr(got, name) for name in fields] == [getattr(expected, name) for name in fields]
    assert_same_logprobs(got.logprobs, expected.logprobs)


def assert_same(got: Finished, expected: RequestOutput) -> None:
    for completion, output in zip(got.completions, expected.outputs, strict=True):
        assert_same_answer(completion, output)
    assert got.num_prompt_tokens == len(expected.prompt_token_ids)
    assert_same_logprobs(got.prompt_logprobs, expected.prompt_logprobs)


def assert_deltas_add_up(deltas: list[Delta], finished: Finished) -> None:
    for completion in finished.completions:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in mine) == completion.text
        assert [token for delta in mine for token in delta.token_ids] == completion.token_ids
        if completion.logprobs is not None:
            assert [entry for delta in mine for entry in delta.logprobs or ()] == completion.logprobs
        assert [d.finish_reason for d in mine if d.finish_reason is not None] == [completion.finish_reason]
        assert mine[-1].finish_reason == completion.finish_reason
        assert (mine[-1].stop_reason, mine[-1].error) == (completion.stop_reason, completion.error)


# ---- the same answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMS)
async def test_answers_are_those_of_the_engine_in_this_process(client, llm, name):
    ids = prompt(9, seed=1)
    expected = llm.generate(ids, SamplingParams(**PARAMS[name]), use_tqdm=False)[0]
    streamed, whole = await asyncio.gather(
        read(submit(client, ids, **PARAMS[name])), read(submit(client, ids, streamed=False, **PARAMS[name]))
    )
    assert whole[0] == []
    assert_same(whole[1], expected)
    assert_same(streamed[1], expected)
    assert_deltas_add_up(*streamed)
    assert len(streamed[0]) >= len(expected.token_ids)
    finished = streamed[1]
    assert min(finished.queue_s, finished.prefill_s, finished.decode_s) >= 0
    assert finished.queue_s + finished.prefill_s + finished.decode_s > 0


async def test_many_at_once(client, llm):
    names = list(PARAMS)
    requests = [(prompt(1 + i % 30, seed=i), PARAMS[names[i % len(names)]]) for i in range(40)]
    params = [SamplingParams(**p) for _, p in requests]
    expected = llm.generate([ids for ids, _ in requests], params, use_tqdm=False)
    got = await asyncio.gather(
        *(read(submit(client, ids, streamed=bool(i % 3), **p)) for i, (ids, p) in enumerate(requests))
    )
    for i, ((deltas, finished), output) in enumerate(zip(got, expected, strict=True)):
        assert_same(finished, output)
        if i % 3:
            assert_deltas_add_up(deltas, finished)
        else:
            assert not deltas
    await until(lambda: client.stats.num_running == 0 and client.stats.kv_cache_usage == 0)


async def test_info_is_that_of_the_model(client, llm, options):
    info, resolved = client.info, llm.engine.resolved
    assert info.model_path == options["model"]
    assert (info.vocab_size, info.block_size, info.dtype) == (VOCAB, 4, "float32")
    assert (info.max_model_len, info.max_num_seqs) == (resolved.max_model_len, resolved.max_num_seqs)
    assert info.num_blocks == 64
    assert info.eos_token_ids == list(llm.engine.eos_token_ids)
    assert await client.wait_ready() is info


async def test_cached_tokens_are_counted_until_the_cache_is_reset(client):
    ids = prompt(13, seed=99)
    cached = []
    for reset in (True, False, True):
        if reset:
            await client.reset_prefix_cache()
        cached.append((await read(submit(client, ids, max_tokens=1)))[1].num_cached_tokens)
    assert cached == [0, 12, 0]


async def test_steps_are_counted(client):
    before, told = client.stats, []
    client.on_steps = told.extend
    await read(submit(client, prompt(3, seed=98), max_tokens=4, temperature=0, ignore_eos=True))
    await until(lambda: told)
    client.on_steps = lambda _: None
    assert told == [4, 1, 1, 1]
    assert client.stats.num_steps == before.num_steps + 4
    assert client.stats.num_output_tokens == before.num_output_tokens + 4


# ---- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "params", "sentence"),
    [
        ([], {}, "the prompt is empty"),
        ([5, VOCAB], {}, "out of vocabulary"),
        ([5, 2**70], {}, "cannot be sent"),
        ([5, "x"], {}, "a list of token ids"),
        ([5, 6.0], {}, "a list of token ids"),
        ([5] * 64, {}, "the context holds 64"),
        ([5], {"logprobs": 21}, "must be at most 20"),
        ([5], {"logit_bias": {VOCAB: 1}}, "this model's vocabulary"),
        ([5], {"max_tokens": 2**70}, "cannot be sent"),
        ([5], {"stop": "\ud800"}, "cannot be sent"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_hurts_nobody(client, llm, ids, params, sentence):
    other = submit(client, [7, 8, 9], temperature=0, max_tokens=4)
    with pytest.raises(RequestRefused, match=sentence):
        await read(submit(client, ids, **params))
    expected = llm.generate([7, 8, 9], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
    assert_same((await read(other))[1], expected)


async def test_a_request_id_in_use_is_refused(client):
    first = client.submit([5], SamplingParams(max_tokens=3, seed=1), request_id="twice", streamed=True)
    with pytest.raises(RequestRefused, match="use another"):
        await read(client.submit([6], SamplingParams(max_tokens=3), request_id="twice"))
    assert (await read(first))[1].completions[0].token_ids
    await read(client.submit([6], SamplingParams(max_tokens=3), request_id="twice"))  # free again


# ---- aborted -----------------------------------------------------------------------------------------------------

LONG = {"temperature": 0, "ignore_eos": True}
"""Until the context is full: 50 steps or more."""


@pytest.mark.parametrize("n", [1, 3])
async def test_an_aborted_request_is_told_so_and_gives_its_blocks_back(client, n):
    handle = submit(client, prompt(9, seed=5), n=n, **LONG)
    items = aiter(handle)
    read_before = [await anext(items) for _ in range(4)]
    handle.abort()
    handle.abort()
    *deltas, finished = [*read_before, *[item async for item in items]]
    assert [c.finish_reason for c in finished.completions] == ["abort"] * n
    assert all(len(c.token_ids) < 50 for c in finished.completions)
    assert_deltas_add_up(deltas, finished)
    await until(lambda: client.stats.num_running == 0 and client.stats.kv_cache_usage == 0)
    handle.abort()


async def test_abort_of_a_waiting_request(client):
    running = [submit(client, prompt(3, seed=i), **LONG) for i in range(8)]  # all the seats
    waiting = submit(client, prompt(3, seed=9), **LONG)
    await anext(aiter(running[0]))
    waiting.abort()
    _, finished = await read(waiting)
    assert finished.completions[0].finish_reason == "abort"
    assert finished.completions[0].token_ids == []
    assert (finished.prefill_s, finished.decode_s) == (0, 0)
    assert finished.queue_s > 0
    for handle in running:
        handle.abort()
    await until(lambda: client.stats.kv_cache_usage == 0)


async def test_whoever_stops_reading_ends_the_request(client):
    async def read_one(handle):
        async for _ in handle:
            break

    async def read_all(handle):
        async for _ in handle:
            pass

    handles = [submit(client, prompt(5, seed=i), **LONG) for i in range(5)]
    await asyncio.gather(*(read_one(handle) for handle in handles[:2]))
    aiter(handles[2])  # never advanced, and let go
    closed = aiter(handles[3])
    await anext(closed)
    await closed.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(closed)
    reader = asyncio.create_task(read_all(handles[4]))
    await asyncio.sleep(0.02)
    reader.cancel()
    num_steps = client.stats.num_steps
    await until(lambda: not client._requests)
    await until(lambda: client.stats.num_steps > num_steps and client.stats.kv_cache_usage == 0)
    assert client.stats.num_steps - num_steps < 40


class Served:
    """An `EngineLoop` in a thread of this process, and the server's end of its connection."""

    def __init__(self, llm: LLM) -> None:
        self.sock, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.sock.settimeout(5)
        self.channel = engine_process.Channel(theirs)
        self.loop = engine_process.EngineLoop(llm.engine, self.channel)
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self._frames = FrameReader(FromEngine)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run([])
        except Exception as error:
            self.failure = error

    def send(self, message) -> None:
        self.sock.sendall(pack(message))

    def read_until(self, condition) -> list[Any]:
        """All messages up to the first frames after which the condition on them holds."""
        messages: list[Any] = []
        while not condition(messages):
            messages += self._frames.feed(self.sock.recv(1 << 16))
        return messages

    def end(self) -> None:
        self.send(Shutdown())
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.sock.close()


def of_type(messages, kind) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


async def test_nothing_is_lost_whatever_clients_do(client, llm):
    """Requests come, are read, aborted and cancelled at random; those that stay get their answers."""
    rng = random.Random(5)
    names = [name for name in PARAMS if name != "greedy, no max_tokens"]
    requests = [(prompt(rng.randrange(1, 40), seed=i), rng.choice(names)) for i in range(40)]
    params = [SamplingParams(**PARAMS[name]) for _, name in requests]
    expected = llm.generate([ids for ids, _ in requests], params, use_tqdm=False)

    async def one(i: int, what: str) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        ids, name = requests[i]
        handle = submit(client, ids, streamed=bool(i % 2), **PARAMS[name])
        if what == "read":
            deltas, finished = await read(handle)
            assert_same(finished, expected[i])
            if i % 2:
                assert_deltas_add_up(deltas, finished)
        elif what == "abort":
            asyncio.get_running_loop().call_later(rng.random() * 0.1, handle.abort)
            deltas, finished = await read(handle)
            if i % 2:
                assert_deltas_add_up(deltas, finished)
            for completion, output in zip(finished.completions, expected[i].outputs, strict=True):
                assert completion.token_ids == output.token_ids[: len(completion.token_ids)]
        elif what == "cancel":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read(handle), 0.001)
        elif what == "ping":
            handle.abort()
            assert await client.is_responsive(5.0)

    kinds = rng.choices(["read", "abort", "cancel", "ping"], weights=[3, 2, 1, 1], k=len(requests))
    await asyncio.gather(*(one(i, kind) for i, kind in enumerate(kinds)))
    await until(lambda: not client._requests)
    await until(lambda: client.stats.num_running == client.stats.num_waiting == client.stats.kv_cache_usage == 0)


async def test_text_that_was_held_back_comes_with_the_abort(options):
    """A stop string that is only begun is withheld; deltas add up to the answer all the same."""
    with tiny_llm(tokenizer=options["model"], skip_tokenizer_init=False) as llm:
        llm.engine._runner = ScriptedRunner(llm, {5: llm.get_tokenizer().encode("one#")}, {5: 1})
        served = Served(llm)
        params = {"temperature": 0, "ignore_eos": True, "stop": ["#" * 70]}
        served.send(Submit("r", [5], params, streamed=True))
        before = served.read_until(lambda m: len(of_type(m, Deltas)) >= 12)
        served.send(Abort("r"))
        messages = [*before, *served.read_until(lambda m: of_type(m, Finished))]
        served.end()
    (finished,) = of_type(messages, Finished)
    deltas = [delta for message in of_type(messages, Deltas) for delta in message.items]
    assert_deltas_add_up(deltas, finished)
    assert finished.completions[0].text.startswith("one####")
    assert (deltas[-1].finish_reason, deltas[-1].token_ids) == ("abort", [])
    assert deltas[-1].text.startswith("####")


# ---- grammars ----------------------------------------------------------------------------------------------------

DIGITS = {"structured_outputs": {"regex": "[0-9]{3}"}, "temperature": 0, "max_tokens": 8}


async def test_a_grammar_is_followed_and_a_wrong_one_refused(client, llm):
    expected = llm.generate([7, 8, 9], SamplingParams(**DIGITS), use_tqdm=False)[0]
    assert expected.text.isdigit()
    deltas, finished = await read(submit(client, [7, 8, 9], **DIGITS))
    assert_same(finished, expected)
    assert_deltas_add_up(deltas, finished)
    with pytest.raises(RequestRefused, match="regular expression"):
        await read(submit(client, [7], structured_outputs={"regex": "(["}))
    with pytest.raises(RequestRefused, match="prompt is empty"):
        await read(submit(client, [], **DIGITS))


async def test_no_step_waits_for_a_grammar_and_whoever_waits_for_one_can_be_aborted(options, monkeypatch):
    """A grammar that is being compiled until it is let go: others go on, an idle engine wakes for it."""
    with tiny_llm(tokenizer=options["model"], skip_tokenizer_init=False) as llm:
        engine, let_go, prepare = llm.engine, threading.Event(), llm.engine.prepare

        def slow(params):
            found = prepare(params)
            if found is None:
                return None
            later: Future[Any] = Future()

            def compile_it():
                let_go.wait(10)
                if later.set_running_or_notify_cancel():
                    later.set_result(found.result())

            threading.Thread(target=compile_it).start()
            return later

        monkeypatch.setattr(engine, "prepare", slow)
        served = Served(llm)
        served.send(Submit("slow", [7, 8, 9], DIGITS))
        served.send(Submit("left", [7, 8, 9], DIGITS | {"n": 2}, streamed=True))
        served.send(Submit("other", [7, 8, 9], {"temperature": 0, "max_tokens": 4}))
        served.send(Abort("left"))
        messages = served.read_until(lambda m: len(of_type(m, Finished)) == 2)
        ends = {finished.request_id: finished for finished in of_type(messages, Finished)}
        assert [c.finish_reason for c in ends["other"].completions] == ["length"]
        assert [c.finish_reason for c in ends["left"].completions] == ["abort"] * 2
        assert [d.finish_reason for m in of_type(messages, Deltas) for d in m.items] == ["abort"] * 2
        await asyncio.sleep(0.1)  # idle
        let_go.set()
        (slow_end,) = of_type(served.read_until(lambda m: of_type(m, Finished)), Finished)
        assert (slow_end.request_id, slow_end.completions[0].text.isdigit()) == ("slow", True)
        served.end()
    assert served.failure is None


# ---- a server that does not read ---------------------------------------------------------------------------------


def talkative(number: int) -> Submit:
    params = {"temperature": 0, "ignore_eos": True, "logprobs": 20}
    return Submit(f"r{number}", prompt(3, seed=number), params, streamed=True)


async def test_the_engine_waits_for_a_server_that_does_not_read(monkeypatch):
    monkeypatch.setattr(engine_process, "MAX_UNSENT_BYTES", 30_000)
    with tiny_llm() as llm:
        served = Served(llm)
        for number in range(8):
            served.send(talkative(number))
        await until(lambda: served.channel.num_unsent_bytes > 30_000)
        num_steps, unsent = llm.engine.stats.num_steps, served.channel.num_unsent_bytes
        await asyncio.sleep(0.3)
        assert num_steps < 40
        assert llm.engine.stats.num_steps == num_steps
        assert served.channel.num_unsent_bytes == unsent < 60_000
        messages = served.read_until(lambda m: len(of_type(m, Finished)) == 8)
        served.end()
    assert served.failure is None
    deltas = [delta for message in of_type(messages, Deltas) for delta in message.items]
    for finished in of_type(messages, Finished):
        assert_deltas_add_up([delta for delta in deltas if delta.request_id == finished.request_id], finished)


async def test_the_engine_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(engine_process, "MAX_UNSENT_BYTES", 1000)
    monkeypatch.setattr(engine_process, "MAX_UNREAD_S", 0.2)
    with tiny_llm() as llm:
        served = Served(llm)
        served.send(talkative(0))
        served.thread.join(5)
    assert not served.thread.is_alive()
    assert "the server has read nothing for 0" in str(served.failure)


# ---- a reader that is slow ---------------------------------------------------------------------------------------


async def test_deltas_that_nobody_reads_are_merged():
    handle = ProcessRequestHandle("r", lambda _: None)
    sent: list[Delta] = []
    for step in range(700):
        for index in range(3):
            last = step == 699
            logprobs = [[TokenLogprob(step, -1.0, 1, "x")]] if index == 1 else None
            delta = Delta("r", index, f"{index}{step},", [step], logprobs, "stop" if last else None, "x", None)
            sent.append(delta)
            handle.put(delta)
            assert len(handle._queue) <= 64
    completions = [
        Completion(
            index,
            "".join(d.text for d in sent if d.index == index),
            list(range(700)),
            [entry for d in sent if d.index == 1 for entry in d.logprobs] if index == 1 else None,
            "stop",
            "x",
            None,
        )
        for index in range(3)
    ]
    handle.end(Finished("r", completions, 1, 0))
    deltas, finished = await read(handle)
    assert_deltas_add_up(deltas, finished)
    assert all(delta.logprobs is None for delta in deltas if delta.index != 1)
    assert merged([sent[0]]) is sent[0]


# ---- alive -------------------------------------------------------------------------------------------------------


async def test_pings_are_answered_between_steps(client):
    handle = submit(client, prompt(5, seed=3), **LONG)
    assert all(await asyncio.gather(*(client.is_responsive(1.0) for _ in range(20))))
    handle.abort()
    assert await client.is_responsive(1.0)


async def test_an_idle_engine_sleeps(client):
    await until(lambda: not client._requests)
    await asyncio.sleep(0.1)
    before = activity(client.pid)
    await asyncio.sleep(1.0)
    assert activity(client.pid) == before


def activity(pid: int) -> tuple[int, ...]:
    """How often the main thread was woken, and the CPU time of the process in ticks."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    switches = [int(line.split()[1]) for line in status if "ctxt_switches" in line]
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (*switches, int(stat[11]), int(stat[12]))
