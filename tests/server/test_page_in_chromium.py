"""The chat page in a real browser, against an API that answers as it is told."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from rorqual.server import page
from rorqual.server.app import create_app
from rorqual.server.settings import ServerSettings
from tests.cli.load_server import serving
from tests.server import chromium
from tests.server.fake_engine import FakeEngineClient, chat_tokenizer, says

pytestmark = pytest.mark.skipif(chromium.BINARY is None, reason="needs Chromium")
SHOTS = os.environ.get("RORQUAL_SCREENSHOTS")
"""Where to leave pictures for people to look at."""

MARKDOWN = """## Whales

A **rorqual** has *pleats*: see [the list](https://example.org/rorquals).

1. blue
2. fin
   - of the north

| name | tonnes |
|------|-------:|
| blue | 150 |
| minke | 9 |

```python
def dive(depth_m):
    return "<b>" * depth_m  # a line so long that it has to be scrolled sideways on a phone, whatever its width is
```

<img src=x onerror="document.title = 'taken'"> & <script>document.title = 'taken'</script>
"""


class Api:
    """What the page's requests meet, and what they were."""

    def __init__(self):
        self.pieces, self.delay_s, self.status, self.key, self.fault = ["Hello", " there"], 0.0, 200, None, None
        self.thoughts = []
        self.bodies, self.gone = [], 0
        self.app = FastAPI()
        self.app.include_router(page.router())
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.chat)

    def refused(self, request):
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "this key is not known", "code": None}}, 401)
        return None

    async def models(self, request: Request):
        return self.refused(request) or {"data": [{"id": "tiny"}, {"id": "other"}]}

    async def chat(self, request: Request):
        self.bodies.append(await request.json())
        if refused := self.refused(request):
            return refused
        if self.status != 200:
            return JSONResponse({"error": {"message": "temperature must be at most 2, got 9"}}, self.status)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self):
        def event(delta=None, finish_reason=None, **more):
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
            return f"data: {json.dumps({'choices': choices, **more})}\n\n"

        try:
            yield event({"role": "assistant", "content": ""})
            deltas = [{"reasoning_content": t} for t in self.thoughts] + [{"content": t} for t in self.pieces]
            for delta in deltas:
                await asyncio.sleep(self.delay_s)
                yield event(delta)
            if self.fault:
                yield f"data: {json.dumps({'error': {'message': self.fault}})}\n\n"
                return
            yield event({}, "stop")
            yield event(usage={"completion_tokens": len(deltas)})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone += 1
            raise


@pytest.fixture
def api():
    api = Api()
    with serving(api.app) as url:
        api.address = f"{url}/"
        yield api


@pytest.fixture
def tab(api):
    with chromium.Page() as tab:
        tab.open(api.address)
        tab.wait("!document.getElementById('model').disabled")
        yield tab


def shot(tab, name):
    if SHOTS:
        tab.screenshot(Path(SHOTS) / f"{name}.png")


def say(tab, text):
    tab.run("document.getElementById('prompt').focus()")
    tab.type(text)
    tab.press("Enter")


IDLE = "document.getElementById('stop').hidden"
LAST = "document.querySelector('.message:last-child')"


def text_of(tab, selector=".text"):
    return tab.run(f"{LAST}.querySelector({json.dumps(selector)})?.innerText")


def test_an_answer_is_streamed_and_shown_with_its_speed(api, tab):
    api.delay_s, api.pieces = 0.05, [*MARKDOWN.splitlines(keepends=True)]
    say(tab, "What is a rorqual?")
    tab.wait(f"{LAST}.querySelector('ol')")
    assert not tab.run(IDLE)
    tab.wait(IDLE)
    assert tab.run(f"[...{LAST}.querySelectorAll('h2, li, th, pre')].map((e) => e.tagName).join(' ')") == (
        "H2 LI LI LI TH TH PRE"
    )
    assert tab.run(f"{LAST}.querySelectorAll('img, script').length") == 0
    assert '<img src=x onerror="document.title' in text_of(tab)
    link = f"(({{ href, rel, target }}) => [href, rel, target])({LAST}.querySelector('a'))"
    assert tab.run(link) == ["https://example.org/rorquals", "noopener noreferrer nofollow", "_blank"]
    facts = text_of(tab, ".facts span")
    assert facts.startswith("first token ")
    assert f"{len(api.pieces)} tokens" in facts
    assert 5 < float(facts.split(" · ")[1].removesuffix(" tok/s")) < 25
    shot(tab, "answer")
    assert tab.run("document.title") == "Rorqual"
    assert tab.console == []
    assert {address.split("/")[2] for address in tab.requests if not address.startswith("data:")} == {
        api.address.split("/")[2]
    }
    assert api.bodies[0] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is a rorqual?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_settings_are_sent_and_kept_and_the_key_only_in_this_tab(api, tab):
    fields = {"system": "Be brief.", "temperature": "0.5", "max-tokens": "9", "key": "secret"}
    for name, value in fields.items():
        tab.run(f"document.getElementById('settings').open = true; document.getElementById('{name}').focus()")
        tab.type(value)
    tab.press("Tab")
    # At once, as a person's choice is: the list comes anew with the key, and keeps the last choice.
    choose = "const m = document.getElementById('model'); m.value = 'other'; m.dispatchEvent(new Event('change'))"
    tab.run(f"(() => {{ {choose} }})()")
    shot(tab, "settings")
    say(tab, "Hi")
    tab.wait(f"{IDLE} && document.querySelectorAll('.message').length === 2")
    body = api.bodies[-1]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("other", 0.5, 9)
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "secret" not in tab.run("JSON.stringify(localStorage)")
    tab.open(api.address)
    tab.wait("document.getElementById('model').value === 'other'")
    kept = {name: tab.run(f"document.getElementById('{name}').value") for name in fields}
    assert kept == fields
    assert tab.run("[...document.querySelectorAll('.message .text')].map((e) => e.innerText)") == ["Hi", "Hello there"]


def test_stop_ends_the_request_and_keeps_what_came(api, tab):
    api.delay_s, api.pieces = 0.03, [f"word{i} " for i in range(2000)]
    say(tab, "Talk")
    tab.wait(f"{LAST}.innerText.includes('word5')")
    tab.run("document.getElementById('stop').click()")
    tab.wait(IDLE)
    end = time.monotonic() + 5
    while not api.gone and time.monotonic() < end:
        time.sleep(0.02)
    assert api.gone == 1
    assert text_of(tab, ".facts span").endswith("stopped")
    assert "word5" in text_of(tab)
    assert tab.run(f"{LAST}.querySelector('.error')") is None
    api.delay_s, api.pieces = 0.0, ["Done"]
    say(tab, "And now?")
    tab.wait(f"{IDLE} && {LAST}.innerText.includes('Done')")
    assert [m["role"] for m in api.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    assert tab.console == []


def test_escape_stops_too_and_clear_forgets(api, tab):
    api.delay_s, api.pieces = 0.03, ["x "] * 2000
    say(tab, "Talk")
    tab.wait(f"{LAST}.innerText.includes('x x')")
    tab.press("Escape")
    tab.wait(IDLE)
    say(tab, "Again")
    tab.wait(f"{LAST}.innerText.includes('x x')")
    tab.run("document.getElementById('clear').click()")
    tab.wait(IDLE)
    assert tab.run("document.querySelectorAll('.message').length") == 0
    tab.open(api.address)
    assert tab.run("document.querySelectorAll('.message').length") == 0


def test_reasoning_is_folded_once_the_answer_begins(api, tab):
    api.thoughts, api.delay_s, api.pieces = ["I *think*", " so"], 0.1, ["Yes", ", ", "it", " ", "is"]
    say(tab, "Is it?")
    tab.wait(f"{LAST}.querySelector('details.reasoning[open]')")
    tab.wait(IDLE)
    assert tab.run(f"{LAST}.querySelector('details.reasoning').open") is False
    assert tab.run(f"{LAST}.querySelector('details.reasoning .text').textContent") == "I think so"
    assert tab.run(f"{LAST}.querySelector(':scope > .text').innerText") == "Yes, it is"
    shot(tab, "reasoning")
    say(tab, "Sure?")
    tab.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
    assert api.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Yes, it is"}


def test_errors_are_shown_where_they_happen_and_can_be_tried_again(api, tab):
    api.status = 400
    say(tab, "Hi")
    tab.wait(f"{LAST}.querySelector('[role=alert]')")
    assert text_of(tab, ".error") == "temperature must be at most 2, got 9 (HTTP 400)"
    shot(tab, "error")
    api.status, api.fault = 200, "the engine is gone"
    tab.run(f"[...{LAST}.querySelectorAll('button')].find((b) => b.innerText === 'Try again').click()")
    tab.wait(f"{LAST}.querySelector('.error')?.innerText === 'the engine is gone'")
    assert text_of(tab) == "Hello there"
    api.fault = None
    tab.run(f"[...{LAST}.querySelectorAll('button')].find((b) => b.innerText === 'Try again').click()")
    tab.wait(f"{IDLE} && !document.querySelector('.message .error')")
    assert api.bodies[0] == api.bodies[1] == api.bodies[2]
    tab.run(f"[...{LAST}.querySelectorAll('button')].find((b) => b.innerText === 'Regenerate').click()")
    tab.wait(f"{IDLE} && {LAST}.innerText.includes('Hello there')")
    assert len(api.bodies) == 4
    assert tab.run("document.querySelectorAll('.message').length") == 2


def test_a_missing_key_is_asked_for(api, tab):
    api.key = "secret"
    tab.open(api.address)
    tab.wait("!document.getElementById('notice').hidden")
    assert tab.run("document.getElementById('notice').innerText") == "this key is not known (HTTP 401)"
    assert tab.run("document.getElementById('settings').open")
    tab.run("document.getElementById('key').focus()")
    tab.type("secret")
    tab.press("Tab")
    tab.wait("document.getElementById('notice').hidden && !document.getElementById('model').disabled")
    say(tab, "Hi")
    tab.wait(f"{LAST}?.innerText.includes('Hello there')")


def test_shift_enter_starts_a_line_and_enter_sends(api, tab):
    tab.run("document.getElementById('prompt').focus()")
    tab.type("one")
    tab.press("Enter", shift=True)
    tab.type("two")
    assert tab.run("document.getElementById('prompt').value") == "one\ntwo"
    tab.press("Enter")
    tab.wait(f"{IDLE} && document.querySelectorAll('.message').length === 2")
    assert api.bodies[0]["messages"][0]["content"] == "one\ntwo"
    assert tab.run("document.getElementById('prompt').value") == ""


def test_copy_takes_the_code_alone(api, tab):
    api.pieces = ["Do:\n```sh\nls -l\n```\n"]
    say(tab, "How?")
    tab.wait(f"{IDLE} && {LAST}.querySelector('.code button')")
    tab.run("Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (t) => { window.copied = t; }}})")
    tab.run(f"{LAST}.querySelector('.code button').click()")
    tab.wait(f"{LAST}.querySelector('.code button').innerText === 'Copied'")
    assert tab.run("window.copied") == "ls -l"


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone(api, dark):
    api.pieces = [MARKDOWN]
    with chromium.Page(width=375, height=667, dark=dark, phone=True) as tab:
        tab.open(api.address)
        tab.wait("!document.getElementById('model').disabled")
        say(tab, "What is a rorqual, and how long can a single word be: " + "a" * 80)
        tab.wait(f"{IDLE} && {LAST}.querySelector('pre')")
        shot(tab, f"phone-{'dark' if dark else 'light'}")
        assert tab.run("document.documentElement.scrollWidth") == 375
        assert tab.run("document.getElementById('log').scrollWidth <= 375")
        visible = (
            "['prompt', 'send', 'model', 'clear'].every((id) => { const r = document.getElementById(id)"
            ".getBoundingClientRect(); return r.width > 30 && r.left >= 0 && r.right <= 375 && r.bottom <= 667; })"
        )
        assert tab.run(visible)
        colours = tab.run("['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])")
        brightness = [sum(map(int, c.removeprefix("rgb(").removesuffix(")").split(","))) for c in colours]
        assert (brightness[0] > brightness[1]) is dark


def test_the_server_itself():
    engine = FakeEngineClient(says("**Hi** there, world"), delay_s=0.01)
    settings = ServerSettings(served_model_name=("fake",), api_key=("secret",))
    with serving(create_app(engine, settings, chat_tokenizer())) as address, chromium.Page() as tab:
        tab.open(address)
        tab.wait("document.getElementById('notice').innerText.includes('401')")
        tab.run("document.getElementById('key').focus()")
        tab.type("secret")
        tab.press("Tab")
        tab.wait("document.getElementById('model').value === 'fake'")
        say(tab, "Hello")
        tab.wait(f"{IDLE} && {LAST}.querySelector('strong')")
        assert text_of(tab) == "Hi there, world"
        assert f"{len(chat_tokenizer().encode('**Hi** there, world')) + 1} tokens" in text_of(tab, ".facts span")
        engine.script, engine.delay_s = says("word " * 100, end=False), 0.05
        say(tab, "Talk")
        tab.wait(f"{LAST}.innerText.includes('word')")
        tab.press("Escape")
        tab.wait(IDLE)
        end = time.monotonic() + 5
        while not engine.requests[-1].ended.is_set() and time.monotonic() < end:
            time.sleep(0.02)
        assert engine.requests[-1].aborted
        engine.die("the engine's process was killed")
        say(tab, "Still there?")
        tab.wait(f"{LAST}.querySelector('.error')")
        assert "HTTP 503" in text_of(tab, ".error")
