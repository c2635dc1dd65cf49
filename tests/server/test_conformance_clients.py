"""Libraries on top of the API: a stream, a tool call, a JSON schema.

Where they are not installed, RORQUAL_CLIENTS may name a folder that they were installed into.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.fake_engine import says
from tests.server.live import Live, live

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TEXT = "Grüße aus Köln 日本語"
PERSON = '{"name": "Ada", "age": 36}'
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH", ""), os.environ.get("RORQUAL_CLIENTS", "")))
    ),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would be fetched
    "OPENAI_API_KEY": "none",
    "LANGSMITH_TRACING": "false",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(settings={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}) as server:
        yield server


def run(library: str, program: str, server: Live) -> str:
    """What a program prints, in a process of its own; skips where the library is not installed."""
    found = subprocess.run(
        [sys.executable, "-c", f"import {library}"], env=ENVIRONMENT, capture_output=True, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"{library} is not installed")
    environment = ENVIRONMENT | {"URL": f"{server.url}/v1", "PYTHONIOENCODING": "utf-8"}
    made = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout


LANGCHAIN = """
import os
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

fixed = dict(model="fake", base_url=os.environ["URL"], api_key="none", max_retries=0)
model = ChatOpenAI(use_responses_api={responses}, **fixed)
"""

LANGCHAIN_STREAM = (
    LANGCHAIN
    + """
text = lambda m: m.content if isinstance(m.content, str) else "".join(b.get("text", "") for b in m.content)
pieces = list(model.stream("Hello"))
assert len(pieces) > 2
print("".join(map(text, pieces)) == text(model.invoke("Hello")), text(model.invoke("Hello")))
whole = pieces[0]
for piece in pieces[1:]:
    whole += piece
assert whole.usage_metadata is None or whole.usage_metadata["output_tokens"] > 2
"""
)

LANGCHAIN_TOOLS = (
    LANGCHAIN
    + """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

@tool
def weather(city: str) -> str:
    "The weather in a city."
    return "rain in " + city

able = model.bind_tools([weather])
message = able.invoke("How is it in Köln?")
(call,) = message.tool_calls
streamed = None
for piece in able.stream("How is it in Köln?"):
    streamed = piece if streamed is None else streamed + piece
assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
print(call["name"], call["args"], weather.invoke(call["args"]))
able.invoke([HumanMessage("How is it in Köln?"), message, ToolMessage("rain", tool_call_id=call["id"])])
"""
)

LANGCHAIN_SCHEMA = (
    LANGCHAIN
    + """
class Person(BaseModel):
    name: str
    age: int

print(repr(model.with_structured_output(Person, method="json_schema").invoke("Who?")))
"""
)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(server: Live, responses: bool) -> None:
    def asked(program: str) -> str:
        return run("langchain_openai", program.replace("{responses}", str(responses)), server)

    server.engine.script = says(TEXT)
    assert asked(LANGCHAIN_STREAM) == f"True {TEXT}\n"
    server.engine.script = says(CALL)
    assert asked(LANGCHAIN_TOOLS) == "weather {'city': 'Köln'} rain in Köln\n"
    server.engine.script = says(PERSON)
    assert asked(LANGCHAIN_SCHEMA) == "Person(name='Ada', age=36)\n"
    assert server.engine.requests[-1].params.structured_outputs.json_schema["properties"].keys() == {"name", "age"}


LITELLM = """
import os
import litellm
from pydantic import BaseModel

litellm.suppress_debug_info = True
fixed = dict(model="hosted_vllm/fake", api_base=os.environ["URL"], api_key="none", num_retries=0)
messages = [{"role": "user", "content": "Hello"}]
"""

LITELLM_STREAM = (
    LITELLM
    + """
chunks = list(litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **fixed))
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
whole = litellm.completion(messages=messages, **fixed)
assert whole.choices[0].finish_reason == "stop"
rebuilt = litellm.stream_chunk_builder(chunks)
assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
print(text == whole.choices[0].message.content, text)
"""
)

LITELLM_TOOLS = (
    LITELLM
    + """
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
message = litellm.completion(messages=messages, tools=[tool], **fixed).choices[0].message
(call,) = message.tool_calls
chunks = list(litellm.completion(messages=messages, tools=[tool], stream=True, **fixed))
rebuilt = litellm.stream_chunk_builder(chunks)
assert rebuilt.choices[0].finish_reason == "tool_calls"
assert rebuilt.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
print(call.function.name, call.function.arguments)
back = [*messages, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
litellm.completion(messages=back, tools=[tool], **fixed)
"""
)

LITELLM_SCHEMA = (
    LITELLM
    + """
class Person(BaseModel):
    name: str
    age: int

said = litellm.completion(messages=messages, response_format=Person, **fixed).choices[0].message.content
print(repr(Person.model_validate_json(said)))
"""
)


def test_litellm(server: Live) -> None:
    server.engine.script = says(TEXT)
    assert run("litellm", LITELLM_STREAM, server) == f"True {TEXT}\n"
    server.engine.script = says(CALL)
    assert run("litellm", LITELLM_TOOLS, server) == 'weather {"city": "Köln"}\n'
    server.engine.script = says(PERSON)
    assert run("litellm", LITELLM_SCHEMA, server) == "Person(name='Ada', age=36)\n"
    assert server.engine.requests[-1].params.structured_outputs.json_schema["properties"].keys() == {"name", "age"}
