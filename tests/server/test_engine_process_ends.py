"""How the engine's process ends: by itself, by a fault, with its server; and what its client says then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rorqual import SamplingParams
from rorqual.server import process_client
from rorqual.server.engine_client import EngineDead
from rorqual.server.frames import MAX_FRAME_BYTES, FrameReader, MalformedFrame, pack
from rorqual.server.messages import Abort, Deltas, Failed, FromEngine, Ping, Pong, Shutdown, Start, ToEngine
from rorqual.server.process_client import COMMAND, ProcessEngineClient
from tests.engine.engines import TINY_OPTIONS, byte_tokenizer
from tests.server import scripted_engine
from tests.tiny import checkpoint_folder

REPOSITORY = Path(__file__).parents[2]
LONG = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("server") / "model"
    shutil.copytree(checkpoint_folder("llama"), folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return TINY_OPTIONS | {"model": str(folder), "skip_tokenizer_init": False}


async def start(options: dict[str, Any], **hooks: Any) -> ProcessEngineClient:
    return await ProcessEngineClient.start(options | hooks, command=scripted_engine.COMMAND)


async def read(client: ProcessEngineClient, request_id: str) -> list[Any]:
    handle = client.submit([5, 6, 7], LONG, request_id=request_id, streamed=True)
    return [item async for item in handle]


async def until_dead(client: ProcessEngineClient, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while client.state != "dead":
        assert time.monotonic() < end, "it does not end"
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pid: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_gone(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.01)


# ---- faults of the engine ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_two_engines_at_once_and_the_end_of_one(options, caplog):
    """Killed like this one, an engine is dead at once, and says so to all who wait for it."""
    one, other = await asyncio.gather(start(options, step_s=0.01), start(options))
    await asyncio.gather(one.wait_ready(), other.wait_ready())
    expected = await read(other, "same")  # an id that both use
    assert (await read(one, "same"))[-1].completions == expected[-1].completions
    readers = [asyncio.create_task(read(one, f"r{i}")) for i in range(3)]
    await asyncio.sleep(0.1)
    os.kill(one.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 1.0)
    for error in results:
        assert isinstance(error, EngineDead)
        assert "ended while serving (killed by SIGKILL" in str(error)
    assert one.state == "dead"
    assert one.failure == str(results[0])
    assert one.failure in caplog.text
    with pytest.raises(EngineDead, match="SIGKILL"):
        one.submit([5], LONG, request_id="late")
    with pytest.raises(EngineDead, match="SIGKILL"):
        await one.wait_ready()
    assert not await one.is_responsive(1.0)
    await one.close()
    assert [type(item) for item in await read(other, "still there")] == [type(item) for item in expected]
    await other.close()
    assert (other.state, other._process.returncode) == ("dead", 0)
    await other.close()


@pytest.mark.asyncio
async def test_faults_in_a_step(options, capfd):
    """An exception is told with its text, a crash with its signal, and a step that hangs makes it unresponsive."""
    failing, crashing, hanging = await asyncio.gather(
        start(options, fail_at_step=3), start(options, crash_at_step=3), start(options, step_s=30)
    )
    clients = [failing, crashing, hanging]
    await asyncio.gather(*(client.wait_ready() for client in clients))
    assert await hanging.is_responsive(1.0)
    readers = [asyncio.create_task(read(client, "r")) for client in clients]
    with pytest.raises(EngineDead, match=r"RuntimeError: this step was meant to fail \(exit code 1\)"):
        await asyncio.wait_for(readers[0], 2)
    with pytest.raises(EngineDead, match="killed by SIGSEGV"):
        await asyncio.wait_for(readers[1], 2)
    start_s = time.monotonic()
    assert await asyncio.gather(hanging.is_responsive(0.1), hanging.is_responsive(0.3)) == [False, False]
    assert time.monotonic() - start_s < 1
    assert await hanging.is_responsive(60)  # a step may take so long
    assert time.monotonic() - start_s < 2
    assert not await hanging.is_responsive(0.5)
    assert hanging._num_pings == 2  # one for those who ask while it is outstanding
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_client, "SECONDS_TO_END", 0.3)
        await asyncio.wait_for(hanging.close(), 2)
    assert hanging._process.returncode == -signal.SIGKILL
    with pytest.raises(EngineDead, match="was closed"):
        await readers[2]
    printed = capfd.readouterr().err
    assert "this step was meant to fail" in printed  # the traceback
    assert "Segmentation fault" in printed  # where it was, by faulthandler


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"model": "/nowhere/at/all"}, "/nowhere/at/all"), ({"blocksize": 3}, "did you mean 'block_size'")],
)
async def test_a_model_that_cannot_be_loaded(options, wrong, sentence):
    client = await ProcessEngineClient.start(options | wrong)
    assert client.state == "loading"
    assert not await client.is_responsive(1.0)
    with pytest.raises(EngineDead, match="still loading"):
        client.submit([5], LONG, request_id="early")
    with pytest.raises(EngineDead, match="still loading"):
        client.info  # noqa: B018
    with pytest.raises(EngineDead, match=sentence):
        await client.wait_ready()
    assert client._process.returncode == 1
    await client.close()


# ---- ends that are wanted ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_close_while_loading_does_not_wait_for_the_model(options):
    client = await start(options, load_s=60)
    await asyncio.sleep(0.2)
    await asyncio.wait_for(client.close(), 1)
    assert client.state == "dead"
    with pytest.raises(EngineDead, match="was closed"):
        await client.wait_ready()


@pytest.mark.asyncio
async def test_a_command_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        await ProcessEngineClient.start({}, command=["/nowhere/at/all"])


PARENT = """
import asyncio, json, sys
from rorqual import SamplingParams
from rorqual.server.process_client import ProcessEngineClient
from tests.server import scripted_engine

async def main():
    loading, *others = json.loads(sys.argv[1])
    clients = [await ProcessEngineClient.start(o, command=scripted_engine.COMMAND) for o in (loading, *others)]
    for client in clients[1:]:
        await client.wait_ready()
    handle = clients[1].submit([5, 6, 7], SamplingParams(), request_id="r", streamed=True)
    await asyncio.sleep(0.2)
    print(*(client.pid for client in clients), flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


def test_no_engine_outlives_its_server(options):
    """Killed, a server can say nothing any more: not to an engine that loads, nor in a step, nor to an idle one."""
    all_options = [options | hooks for hooks in ({"load_s": 60}, {"step_s": 60}, {})]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(all_options)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        for pid in pids[1:]:  # a terminal's Ctrl-C reaches the engine too
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        assert not any(is_gone(pid) for pid in pids)
        parent.kill()
        for pid in pids:
            wait_until_gone(pid, 2.0)


# ---- frames ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine_process_on(sock_pair: tuple[socket.socket, socket.socket]) -> Iterator[subprocess.Popen[bytes]]:
    _, theirs = sock_pair
    fd = theirs.fileno()
    process = subprocess.Popen([*COMMAND, str(fd)], pass_fds=[fd], cwd=REPOSITORY)
    theirs.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def received(sock: socket.socket) -> list[Any]:
    sock.settimeout(10)
    reader, messages = FrameReader(FromEngine), []
    while data := sock.recv(1 << 16):
        messages += reader.feed(data)
    return messages


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (b"\0\0\0\3abc", "no message"),
        (b"GET / HTTP/1.1\r\n\r\n", "was announced"),
        (b"\0\0\0\1\xc1", "no message"),
        (pack(Pong(1)), "Pong"),
        (pack(Ping(1)), "must send Start first, and sent Ping"),
    ],
)
def test_malformed_messages_to_the_engine(sent, sentence):
    pair = ours, _ = socket.socketpair()
    with ours, engine_process_on(pair) as process:
        ours.sendall(sent)
        (failed,) = received(ours)
        assert isinstance(failed, Failed)
        assert sentence in failed.message
        assert process.wait(5) == 1


@pytest.mark.parametrize("sent", [b"", b"\0\0", pack(Shutdown()), pack(Shutdown()) * 2])
def test_an_engine_that_is_left_before_it_starts(sent):
    pair = ours, _ = socket.socketpair()
    with engine_process_on(pair) as process:
        ours.sendall(sent)
        ours.close()
        assert process.wait(5) == 0


def test_a_server_that_has_left_is_not_loaded_for(options):
    pair = ours, _ = socket.socketpair()
    ours.sendall(pack(Start(options)))
    ours.close()
    start_s = time.monotonic()
    with engine_process_on(pair) as process:
        assert process.wait(5) == 0
    assert time.monotonic() - start_s < 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (b"\0\0\0\3abc", "cannot read"),
        (b"HTTP/1.1 400 Bad Request", "was announced"),
        (pack(Ping(1)), "Ping"),
        (pack(Failed("out of wine")) + b"\0", r"out of wine \(exit code 0\)"),
        (b"\0\0\0\x05\x90", r"ended while loading \(exit code 0\)"),
    ],
)
async def test_malformed_messages_to_the_server(sent, sentence):
    code = f"import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall({sent!r})"
    client = await ProcessEngineClient.start({}, command=[sys.executable, "-c", code])
    with pytest.raises(EngineDead, match=sentence):
        await asyncio.wait_for(client.wait_ready(), 5)
    assert client.state == "dead"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 1000])
def test_frames_are_the_same_however_they_are_cut(size):
    messages = [Ping(1), Abort("x" * 300), Start({"model": "é", "list": [1, 2.5, None]}), Shutdown()]
    data = b"".join(map(pack, messages))
    reader = FrameReader(ToEngine)
    got = [message for i in range(0, len(data), size) for message in reader.feed(data[i : i + size])]
    assert got == messages


def test_messages_before_a_malformed_one_are_there():
    reader = FrameReader(ToEngine)
    messages = reader.feed(pack(Ping(1)) + pack(Deltas([])) + pack(Ping(2)))
    assert next(messages) == Ping(1)
    with pytest.raises(MalformedFrame, match="Deltas"):
        next(messages)
    with pytest.raises(MalformedFrame, match="was announced"):
        list(FrameReader(ToEngine).feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))
