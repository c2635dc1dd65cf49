"""The router over stub replicas: what reaches them, what comes back, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.server.stub_replica import routed, soon

pytestmark = pytest.mark.asyncio
LONG = "the quick brown fox jumps over the lazy dog. " * 40


# --- what passes


async def test_requests_and_answers_pass_as_they_are():
    async with routed("a") as router:
        body = {"prompt": "x", "unknown": [1, {"y": None}]}
        headers = {"authorization": "Bearer secret", "x-request-id": "mine", "te": "trailers"}
        answer = await router.client.post("/v1/completions?a=1&b=%20", json=body, headers=headers)
        assert (answer.status_code, answer.json()["name"], answer.headers["x-stub"]) == (200, "a", "a")
        assert len(answer.headers.get_list("date")) == 1
        seen = router.stubs[0].seen[0]
        assert (seen.method, seen.target, seen.body) == ("POST", "/v1/completions?a=1&b=%20", body)
        assert (seen.headers["authorization"], seen.headers["x-request-id"]) == ("Bearer secret", "mine")
        assert seen.headers["host"] == router.stubs[0].url.removeprefix("http://")
        assert "te" not in seen.headers
        for method, path in (("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/openapi.json"), ("GET", "/")):
            assert (await router.client.request(method, path)).json() == {"name": "a"}
        router.stubs[0].faults.append(400)
        refused = await router.client.post("/v1/completions", json={})
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "a says 400")


async def test_streams_come_piece_by_piece():
    async with routed("a") as router:
        stub = router.stubs[0]
        stub.faults.append("hang")
        async with router.client.stream("POST", "/v1/completions", json={"stream": True, "max_tokens": 4}) as answer:
            lines = answer.aiter_lines()
            first = [line async for line, _ in _zip(lines, range(4)) if line]
            assert len(first) == 2  # while the replica still works on the others
            assert stub.running == 1
            stub.release.set()
            rest = [line async for line in lines if line]
        assert len(rest) == 3
        assert rest[-1] == "data: [DONE]"
        assert answer.headers["content-type"] == "text/event-stream"


async def _zip(lines, numbers):
    for number in numbers:
        yield await anext(lines), number


async def test_a_client_that_leaves_ends_its_request():
    async with routed("a") as router:
        stub = router.stubs[0]
        for streamed in (True, False):
            stub.faults.append("hang")
            asking = asyncio.create_task(router.client.post("/v1/completions", json={"stream": streamed}))
            await soon(lambda: stub.running == 1)
            asking.cancel()
            await soon(lambda: stub.running == 0)
        assert stub.left == 2
        await soon(lambda: router.replica(stub).num_running == 0)
        assert await router.complete() == "a"


async def test_behind_a_path_and_for_pages_of_others():
    listener = {"root_path": "/llm", "allowed_origins": ("http://page",)}
    async with routed("a", listener=listener) as router:
        origin = {"origin": "http://page"}
        answer = await router.client.get("/v1/models?x=1", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "http://page"
        assert router.stubs[0].seen[-1].target == "/v1/models?x=1"
        assert (await router.client.get("/health")).status_code == 200


async def test_limits_are_kept_before_a_replica_hears_of_it():
    async with routed("a", listener={"max_body_size": 100}) as router:
        answer = await router.client.post("/v1/completions", json={"prompt": LONG})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert not router.stubs[0].seen


# --- which replica


async def test_the_same_beginning_goes_to_the_same_replica():
    async with routed("a", "b", "c") as router:
        prompts = [f"{name} {LONG}" for name in ("one", "two", "three")]
        first = [await router.complete(prompt) for prompt in prompts]
        assert sorted(first) == ["a", "b", "c"]
        for _ in range(3):
            assert [await router.complete(prompt + "and more") for prompt in prompts] == first


async def test_a_busy_replica_is_passed_over():
    async with routed("a", "b", balance_abs_threshold=2) as router:
        holder, other = router.by_name(await router.complete(LONG))
        holder.faults += ["hang"] * 3
        busy = [asyncio.create_task(router.complete(LONG)) for _ in range(3)]
        await soon(lambda: holder.running == 3)
        assert await router.complete(LONG) == other.name
        holder.release.set()
        assert await asyncio.gather(*busy) == [holder.name] * 3


async def test_what_others_have_sent_there_counts():
    async with routed("a", "b") as router:
        router.stubs[0].load = 7
        await soon(lambda: router.replica(router.stubs[0]).load == 7)
        assert {await router.complete(str(i)) for i in range(4)} == {"b"}


async def test_sessions_stay():
    async with routed("a", "b") as router:
        for fields in ({"headers": {"X-Session-ID": "1"}}, {"user": "u"}, {"prompt_cache_key": "k"}):
            stub, _ = router.by_name(await router.complete(**fields))
            router.replica(stub).num_running += 100
            assert {await router.complete(**fields) for _ in range(3)} == {stub.name}
            router.replica(stub).num_running -= 100


async def test_responses_are_asked_for_where_they_are():
    async with routed("a", "b") as router:
        made = [(await router.client.post("/v1/responses", json={"input": str(i)})).json() for i in range(4)]
        assert {answer["name"] for answer in made} == {"a", "b"}
        for answer in made * 2:
            following = {"input": "more", "previous_response_id": answer["id"]}
            assert (await router.client.post("/v1/responses", json=following)).json()["name"] == answer["name"]
            assert (await router.client.get(f"/v1/responses/{answer['id']}")).status_code == 200
        lines = await router.stream("/v1/responses", input="x")
        streamed = json.loads(lines[1])["response"]["id"]
        stub, _ = router.by_name(streamed.removeprefix("resp_")[0])
        assert (await router.client.delete(f"/v1/responses/{streamed}")).headers["x-stub"] == stub.name


async def test_a_response_that_the_router_does_not_know_is_looked_for():
    async with routed("a", "b") as router:
        headers = {"authorization": "Bearer key"}
        for _ in range(2):
            found = await router.client.get("/v1/responses/resp_b77", headers=headers)
            assert (found.status_code, found.headers["x-stub"]) == (200, "b")
        assert all(seen.headers["authorization"] == "Bearer key" for stub in router.stubs for seen in stub.seen)
        assert len(router.stubs[0].seen) == 1  # it was asked once, and then no more
        assert (await router.client.get("/v1/responses/resp_z")).status_code == 404


async def test_prefix_caches_are_reset_everywhere():
    async with routed("a", "b") as router:
        await router.complete(LONG)
        assert (await router.client.post("/reset_prefix_cache")).status_code == 200
        assert all(stub.seen[-1].target == "/reset_prefix_cache" for stub in router.stubs)
        assert all(len(router.replica(stub).prefixes) == 0 for stub in router.stubs)


# --- faults


async def test_lost_before_the_first_byte_another_replica_answers():
    async with routed("a", "b") as router:
        first, second = router.by_name(await router.complete(LONG))
        for stream in (False, True):
            first.faults.append("lost")
            router.replica(second).prefixes.clear()
            await soon(lambda: router.replica(first).is_healthy)
            if stream:
                lines = await router.stream(prompt=LONG)
                assert lines[-1] == "[DONE]"
                assert second.name in lines[0]
            else:
                assert await router.complete(LONG) == second.name
        assert (router.replica(first).num_errors, router.replica(first).num_retries) == (2, 2)
        first.faults.append(503)
        router.replica(second).prefixes.clear()
        assert await router.complete(LONG) == second.name


async def test_a_request_that_replicas_die_of_does_not_get_them_all():
    async with routed("a", "b", "c") as router:
        for stub in router.stubs:
            stub.faults.append("lost")
        answer = await router.client.post("/v1/completions", json={"prompt": LONG})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert sum(len(stub.seen) for stub in router.stubs) == 2


async def test_lost_before_the_first_byte_the_client_is_told():
    async with routed("a", "b", on_failure="fail") as router:
        first, second = router.by_name(await router.complete(LONG))
        first.faults += ["lost", 503]
        answer = await router.client.post("/v1/completions", json={"prompt": LONG})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert answer.headers["retry-after"]
        await soon(lambda: router.replica(first).is_healthy)
        answer = await router.client.post("/v1/completions", json={"prompt": LONG})
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, f"{first.name} says 503")
        assert router.replica(first).num_retries == 0
        assert not second.seen


@pytest.mark.parametrize("policy", ["fail", "retry"])
async def test_a_dead_replica_gets_nothing_and_comes_back(policy):
    async with routed("a", "b", on_failure=policy, health_check_interval=0.2) as router:
        first, second = router.by_name(await router.complete(LONG))
        first.kill()
        # Nobody has looked at its health since; nothing was sent, so no policy is asked.
        assert {await router.complete(LONG) for _ in range(3)} == {second.name}
        assert not router.replica(first).is_healthy
        await soon(lambda: not len(router.replica(first).prefixes))  # nobody listens: its cache is gone
        assert (await router.client.get("/health")).status_code == 200
        await first.start()
        await soon(lambda: router.replica(first).is_healthy)
        assert {await router.complete(str(i)) for i in range(4)} == {"a", "b"}


async def test_a_stream_that_breaks_ends_with_the_error():
    async with routed("a", "b") as router:
        for stub in router.stubs:
            stub.faults.append("cut")
        lines = await router.stream(max_tokens=5)
        assert len(lines) == 3  # whole events only
        assert json.loads(lines[1])["choices"]
        assert json.loads(lines[-1])["error"]["code"] == "replica_lost"


async def test_an_answer_that_breaks_is_not_whole():
    async with routed("a", "b") as router:
        for stub in router.stubs:
            stub.faults.append("cut")
        with pytest.raises(httpx.RemoteProtocolError):
            await router.complete()
        assert sum(len(stub.seen) for stub in router.stubs) == 1  # it had begun: nobody else is asked


async def test_a_response_that_breaks_ends_as_one_that_failed():
    async with routed("a") as router:
        router.stubs[0].faults.append("cut")
        lines = await router.stream("/v1/responses", input="x")
        assert lines[-2] == "event: response.failed"
        last = json.loads(lines[-1])
        assert (last["type"], last["sequence_number"]) == ("response.failed", 2)
        assert (last["response"]["id"], last["response"]["status"]) == ("resp_a1", "failed")
        assert "was lost" in last["response"]["error"]["message"]


async def test_a_silent_replica_loses_its_requests():
    async with routed("a", "b", health_check_timeout=0.1, health_check_failures=2) as router:
        first, second = router.by_name(await router.complete(LONG))
        first.faults.append("hang")
        asking = asyncio.create_task(router.complete(LONG))
        await soon(lambda: first.running == 1)
        first.silent = True  # its host is gone: no connection ends, and nothing comes
        assert await asking == second.name


async def test_a_replica_that_is_not_ready_gets_no_new_requests_and_keeps_its_own():
    async with routed("a", "b") as router:
        first, second = router.by_name(await router.complete(LONG))
        first.faults.append("hang")
        asking = asyncio.create_task(router.complete(LONG))
        await soon(lambda: first.running == 1)
        first.ready = 503
        await soon(lambda: not router.replica(first).is_healthy)
        assert await router.complete(LONG) == second.name
        assert router.replica(first).failure_code == "engine_dead"
        first.release.set()
        assert await asking == first.name


async def test_a_response_of_a_replica_that_is_not_there_has_to_wait():
    async with routed("a", "b") as router:
        made = (await router.client.post("/v1/responses", json={"input": "x"})).json()
        stub, other = router.by_name(made["name"])
        stub.ready = 503
        await soon(lambda: not router.replica(stub).is_healthy)
        answer = await router.client.get(f"/v1/responses/{made['id']}")
        assert answer.status_code == 503
        assert "busy with itself" in answer.json()["error"]["message"]
        stub.kill()
        await soon(lambda: router.state.balancer.owner(made["id"]) is None)
        answer = await router.client.get(f"/v1/responses/{made['id']}")
        assert (answer.status_code, answer.headers["x-stub"]) == (404, other.name)


async def test_without_any_replica():
    async with routed("a") as router:
        assert (await router.client.get("/ready")).status_code == 200
        router.stubs[0].kill()
        for _ in range(2):
            answer = await router.client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "no_replica"
        for path in ("/health", "/ready", "/v1/models"):
            answer = await router.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert (await router.client.get("/metrics")).status_code == 200
        assert (await router.client.get("/version")).json()["version"]


# --- the router itself


async def test_metrics():
    async with routed("a", "b", publish_replicas=True) as router:
        first, second = router.by_name(await router.complete(LONG))
        await router.complete(LONG + "more")
        await router.complete(user="u")
        await router.complete(user="u")
        first.faults += ["lost", "hang"]
        await soon(lambda: router.replica(first).is_healthy)
        await router.complete(LONG)
        text = (await router.client.get("/metrics")).text
        families = {family.name: family for family in parse_text(text)}

        def of(name, stub, **labels):
            samples = [s for f in families.values() for s in f.samples if s.name == name]
            return next(s.value for s in samples if s.labels == {"replica": stub.url} | labels)

        assert of("rorqual:router_requests_total", first, chosen_by="prefix") == 2
        assert of("rorqual:router_requests_total", first, chosen_by="load") == 1
        assert of("rorqual:router_requests_total", second, chosen_by="session") == 1
        assert of("rorqual:router_errors_total", first) == 1
        assert of("rorqual:router_retries_total", first) == 1
        assert of("rorqual:router_num_requests_running", first) == 0
        assert of("rorqual:router_replica_healthy", second) == 1
        assert of("rorqual:router_prefix_index_blocks", second) == len(LONG) // 128
        assert [s.value for s in families["rorqual:router_unserved_requests"].samples] == [0]
        assert of("vllm:x_total", second) == 3
        load = (await router.client.get("/load")).json()
        assert {shown["url"] for shown in load["replicas"]} == {first.url, second.url}


async def test_draining_ends_what_runs_too_long():
    async with routed("a") as router:
        stub = router.stubs[0]
        stub.faults.append("hang")
        asking = asyncio.create_task(router.stream(max_tokens=5))
        await soon(lambda: stub.running == 1)
        router.server.drain()
        refused = await router.client.post("/v1/completions", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await router.client.get("/ready")).status_code == 503
        lines = await asking
        assert json.loads(lines[-1])["error"]["code"] == "aborted"
        async with asyncio.timeout(5):
            while await is_there(router.client):
                await asyncio.sleep(0.02)


async def is_there(client):
    try:
        return (await client.get("/health")).status_code > 0
    except httpx.TransportError:
        return False
