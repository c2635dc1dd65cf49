from __future__ import annotations

import json
from datetime import datetime

import pytest
from transformers import AutoTokenizer

from rorqual.tokenizer import Tokenizer
from rorqual.tokenizer.chat_template import ChatTemplates
from rorqual.tokenizer.parts import TokenizerParts
from tests.unit.tiny_tokenizers import byte_level, gguf_metadata, save

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3_LIKE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- else %}
        {%- set date_string = "2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

QWEN3_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Goes through parts when there are parts, as models that also read images do.
PARTS = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
"""

ONLY_PARTS = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- for part in message.content | selectattr('type', 'equalto', 'text') %}
        {{- part.text }}
    {%- endfor %}
{%- endfor %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3_LIKE, "qwen3": QWEN3_LIKE}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Wetter für <Ort> & Zeit", "parameters": {"type": "object"}},
    }
]
SYSTEM = {"role": "system", "content": "  Be brief. ü <b>&</b> "}
USER = {"role": "user", "content": "What's 2+2?\n"}
ASSISTANT = {"role": "assistant", "content": "4"}
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
CALLS = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 3}', "tool_call_id": "1"},
]
CHATS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER],
    "assistant last": [USER, ASSISTANT],
    "thought": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "4", "reasoning_content": "hm"}],
    "reasoning under another name": [USER, {"role": "assistant", "content": "4", "reasoning": "hm"}],
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Per template: our tokenizer and transformers'."""
    found = {}
    for name, template in (TEMPLATES | {"parts": PARTS, "only parts": ONLY_PARTS}).items():
        folder = tmp_path_factory.mktemp("folder")
        config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": template}
        save(byte_level("qwen2", bos="<s>"), folder, config)
        found[name] = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    return found


def templates(source, **named):
    return ChatTemplates({"default": source}, named)


def theirs(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["open", "closed"])
def test_rendering_equals_transformers(name, chat, tools, prompt, pairs):
    ours, hf = pairs[name]
    expected = theirs(hf, CHATS[chat], tools=tools, add_generation_prompt=prompt)
    assert ours.render_chat(CHATS[chat], tools=tools, add_generation_prompt=prompt) == expected
    assert ours.encode_chat(CHATS[chat], tools=tools, add_generation_prompt=prompt) == hf.apply_chat_template(
        CHATS[chat], tools=tools, add_generation_prompt=prompt, return_dict=False
    )


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_tool_calls_render_as_in_transformers(name, pairs):
    ours, hf = pairs[name]
    assert ours.render_chat(CALLS, tools=TOOLS) == theirs(hf, CALLS, tools=TOOLS, add_generation_prompt=True)
    assert "Köln" in ours.render_chat(CALLS, tools=TOOLS)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_template_variables_reach_the_template(enable_thinking, pairs):
    ours, hf = pairs["qwen3"]
    rendered = ours.render_chat([USER], enable_thinking=enable_thinking)
    assert rendered == theirs(hf, [USER], add_generation_prompt=True, enable_thinking=enable_thinking)
    assert rendered.endswith("</think>\n\n") is not enable_thinking


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["The answer is", "ends in spaces  ", " \n starts and ends \n", "</s>x"])
def test_continue_final_message_leaves_it_open_as_in_transformers(name, content, pairs):
    ours, hf = pairs[name]
    messages = [USER, {"role": "assistant", "content": content}]
    rendered = ours.render_chat(messages, continue_final_message=True)
    assert rendered == theirs(hf, messages, continue_final_message=True)
    assert rendered.endswith(content if name != "llama3" else content.strip()) or name == "qwen3"
    parts = [USER, {"role": "assistant", "content": [{"type": "text", "text": content}]}]
    assert ours.render_chat(parts, continue_final_message=True) == rendered


def test_continue_final_message_that_cannot_be_is_refused(pairs):
    ours, _ = pairs["chatml"]
    with pytest.raises(ValueError, match="must not both be true"):
        ours.render_chat([USER, ASSISTANT], add_generation_prompt=True, continue_final_message=True)
    for content in ("", None, []):
        with pytest.raises(ValueError, match="needs text in the last message"):
            ours.render_chat([USER, {"role": "assistant", "content": content}], continue_final_message=True)
    with pytest.raises(ValueError, match="prints the last message as it is"):
        templates("{{ messages[0].content }}").render([USER, ASSISTANT], continue_final_message=True)


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_tm1_chat_has_exactly_one_bos(source, tmp_path):
    backend = byte_level("llama-bpe", bos="<s>")
    if source == "folder":
        folder = save(backend, tmp_path, {"bos_token": "<s>", "add_bos_token": True, "chat_template": LLAMA3_LIKE})
        tokenizer = Tokenizer.from_folder(folder)
    else:
        metadata = gguf_metadata(backend, pre="llama-bpe", bos_token_id=3, add_bos_token=True)
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": LLAMA3_LIKE})
    ids = tokenizer.encode_chat([USER])
    assert ids[0] == tokenizer.bos_token_id == 3
    assert ids.count(3) == 1
    assert tokenizer.encode("hello").count(3) == 1  # a plain text gets the tokenizer's own
    assert tokenizer.encode(tokenizer.render_chat([USER])).count(3) == 2  # what encode_chat must not do


NAMED = [
    {"name": "default", "template": "default {{ messages[0].content }}"},
    {"name": "tool_use", "template": "tools {{ tools|length }}"},
    {"name": "rag", "template": "rag {{ documents[0].text }}"},
]


def test_tm6_named_templates_are_chosen(tmp_path):
    folder = save(byte_level("qwen2"), tmp_path, {"chat_template": NAMED})
    ours, hf = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    documents = [{"text": "doc"}]
    assert ours.render_chat([USER]) == theirs(hf, [USER]) == "default What's 2+2?\n"
    assert ours.render_chat([USER], tools=TOOLS) == theirs(hf, [USER], tools=TOOLS) == "tools 1"
    assert ours.render_chat([USER], tools=[]) == "default What's 2+2?\n"
    assert ours.render_chat([USER], chat_template="rag", documents=documents) == "rag doc"
    with pytest.raises(ValueError, match="must be one of 'default', 'rag', 'tool_use', got 'poetry'"):
        ours.render_chat([USER], chat_template="poetry")
    assert Tokenizer.from_folder(folder, chat_template="rag").render_chat([USER], documents=documents) == "rag doc"


def test_tm6_named_templates_without_default_ask_for_a_name():
    with pytest.raises(ValueError, match="must be one of 'rag', got 'default'"):
        ChatTemplates({"rag": "x"}, {}).render([USER])


def calls_loop(body):
    return (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set c = c.function %}"
        + body
        + "{% endfor %}{% endfor %}"
    )


TAKES_APART = [
    "{% for k, v in c.arguments|items %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in c.arguments %}{{ k }}={{ c.arguments[k] }};{% endfor %}",
    "{% set a = c['arguments'] %}{% if a is string %}{% set a = a|from_json %}{% endif %}"
    "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% set a = c.arguments or {} %}{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% if c.arguments is mapping %}{% for k, v in c.arguments|dictsort %}{{ k }}={{ v }};{% endfor %}{% endif %}",
]
WRITES_JSON = [
    "{{ c.arguments | tojson }}",
    "{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}",
    "{% set a = c['arguments'] %}{{ 'x' + (a if a is string else a|tojson) }}",
    "{{ '```json' + c['arguments'] + '```' }}",
    "{{ c.arguments }}",
    "{{ c|tojson }}",
]


@pytest.mark.parametrize("body", TAKES_APART)
def test_arguments_are_an_object_where_the_template_takes_them_apart(body, tmp_path):
    folder = save(byte_level("qwen2"), tmp_path, {"chat_template": calls_loop(body)})
    ours, hf = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": "ü"}}}
    expected = theirs(hf, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert expected == "a=1;b=ü;"
    call = {"function": {"name": "f", "arguments": '{"a":1,"b":"\\u00fc"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ours.render_chat(messages) == expected
    assert call["function"]["arguments"] == '{"a":1,"b":"\\u00fc"}'  # the caller's own
    call["function"]["arguments"] = ""
    assert ours.render_chat(messages) == ""


@pytest.mark.parametrize("body", WRITES_JSON)
def test_arguments_are_written_once_as_json(body):
    template = templates(calls_loop(body))
    for arguments in ('{"a":1}', {"a": 1}):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        rendered = template.render([message])
        assert rendered.replace(" ", "").count('{"a":1}') == 1
        assert "\\" not in rendered


def test_arguments_come_back_to_the_letter_where_the_template_can_print_them():
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{ "a" :1}'}}]}
    for body in WRITES_JSON[1:5]:
        assert '{ "a" :1}' in templates(calls_loop(body)).render([message])


def test_arguments_that_were_cut_off_are_written_as_they_are():
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}
    assert templates(calls_loop("{{ c.arguments|tojson }}")).render([message]) == '"{\\"a\\": "'
    with pytest.raises(ValueError, match="the chat template"):
        templates(calls_loop(TAKES_APART[0])).render([message])


@pytest.mark.parametrize("message", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "missing"])
@pytest.mark.parametrize("name", [*TEMPLATES, "parts", "only parts"])
def test_tm7_content_null_empty_or_missing_is_accepted(name, message, pairs):
    ours, _ = pairs[name]
    call = {"role": "assistant", "tool_calls": [CALL]}
    rendered = ours.render_chat([USER, call | message, CALLS[2]])
    assert rendered == ours.render_chat([USER, call | {"content": ""}, CALLS[2]])
    assert "None" not in rendered


def test_tm7_template_that_asks_for_none_gets_it():
    turn = "{% if m['content'] is none %}calls{{ m.tool_calls|length }}{% else %}text{% endif %}"
    source = "{% for m in messages %}" + turn + "{% endfor %}"
    for message in ({"content": None}, {}):
        assert templates(source).render([USER, {"role": "assistant", "tool_calls": [CALL]} | message]) == "textcalls1"


def test_tm7_other_null_keys_are_left_out():
    source = "{% if messages[0].tool_calls is defined %}calls{% endif %}{{ messages[0].content }}"
    assert templates(source).render([{"role": "user", "content": "x", "tool_calls": None, "name": None}]) == "x"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("name", [*TEMPLATES, "parts", "only parts"])
def test_tm8_text_parts_equal_the_string(name, role, pairs):
    ours, _ = pairs[name]
    chats = [[USER, {"role": role, "content": c}] for c in ("hi", [{"type": "text", "text": "hi"}], ["hi"])]
    rendered = [ours.encode_chat(chat) for chat in chats]
    assert rendered[0] == rendered[1] == rendered[2]
    assert "hi" in ours.decode(rendered[0])


def test_tm8_several_parts_are_all_there(pairs):
    message = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert "one\ntwo" in pairs["chatml"][0].render_chat([message])  # joined by lines, as other servers do
    assert "onetwo" in pairs["parts"][0].render_chat([message])  # the template itself says how


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "at least one message"),
        ("hi", "messages must be a list of objects, got str"),
        ({"role": "user"}, "messages must be a list of objects, got dict"),
        (["hi"], "message 0 must be a JSON object, got str"),
        ([{"content": "x"}], "must have a role"),
        ([{"role": 3, "content": "x"}], "must have a role.*got 3"),
        ([{"role": "user", "content": 3}], "content must be a string, a list of text parts or null, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "got one of type 'image_url'.*reads text only"),
        ([{"role": "user", "content": [3]}], "got one of type 'int'"),
    ],
)
def test_malformed_messages_are_refused(messages, error):
    with pytest.raises(ValueError, match=error):
        templates(CHATML).render(messages)


def test_malformed_tools_are_refused():
    with pytest.raises(ValueError, match="tool 0 must be a JSON object, got function"):
        templates(CHATML).render([USER], tools=[lambda: None])


def test_no_template_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="this model has none: pass --chat-template"):
        Tokenizer.from_folder(save(byte_level("qwen2"), tmp_path)).render_chat([USER])


def test_templates_own_error_is_passed_on():
    source = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(ValueError, match="does not accept these messages: Conversation roles must alternate"):
        templates(source).render([USER])


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ messages[0].name + 'x' }}", "does not accept these messages: .*no attribute 'name'"),
        ("{{ 1 + messages[0].content }}", "failed on these messages: TypeError"),
        ("{{ messages[0].content | int // 0 }}", "failed on these messages: ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "does not accept these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "does not accept these messages: access to attribute 'append' .* is unsafe"),
    ],
)
def test_fault_in_a_template_is_one_sentence(source, error):
    with pytest.raises(ValueError, match=error):
        templates(source).render([USER])


def test_broken_template_is_refused_only_when_it_is_used(tmp_path):
    folder = save(byte_level("qwen2"), tmp_path, {"chat_template": "{% for %}"})
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(ValueError, match="must be valid Jinja, got an error in line 1"):
        tokenizer.render_chat([USER])
    with pytest.raises(ValueError, match="must be valid Jinja"):
        Tokenizer.from_folder(folder, chat_template="{% if %}")


def test_given_template_is_a_file_or_text_and_wins(tmp_path):
    folder = save(byte_level("qwen2"), tmp_path / "model", {"chat_template": CHATML})
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ messages[0].content }}")
    for given in (str(file), "mine {{ messages[0].content }}"):
        assert Tokenizer.from_folder(folder, chat_template=given).render_chat([USER], tools=TOOLS).startswith("mine ")
    metadata = gguf_metadata(byte_level("qwen2"), pre="qwen2")
    assert Tokenizer.from_gguf(metadata, chat_template=str(file)).render_chat([USER]).startswith("mine ")
    with pytest.raises(ValueError, match=r"must be a Jinja file.*\(default\), got 'no/such.jinja'"):
        Tokenizer.from_folder(folder, chat_template="no/such.jinja")


def test_template_files_win_over_tokenizer_config(tmp_path):
    folder = save(byte_level("qwen2"), tmp_path, {})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.from_folder(folder).render_chat([USER]) == "json"
    save(byte_level("qwen2"), tmp_path, {"chat_template": "config"})
    assert Tokenizer.from_folder(folder).render_chat([USER]) == "config"
    (folder / "chat_template.jinja").write_text("jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    ours, hf = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.render_chat([USER]) == theirs(hf, [USER]) == "jinja"
    assert ours.render_chat([USER], tools=TOOLS) == theirs(hf, [USER], tools=TOOLS) == "tools"


def test_jinja_is_set_up_as_templates_expect():
    source = """\
{% for message in messages %}
    {% if loop.index > 1 %}
        {% break %}
    {% endif %}
{% generation %}
{{ message.content }}
{% endgeneration %}
{% endfor %}
{{ {'b': 'ü<&>', 'a': 1} | tojson }}|{{ strftime_now('%Y') }}|{{ bos_token }}|{{ x }}"""
    rendered = templates(source, bos_token="<s>").render([{"role": "user", "content": "hi"}, ASSISTANT], x=7)
    assert rendered == f'hi\n{{"b": "ü<&>", "a": 1}}|{datetime.now().year}|<s>|7'


def test_callers_messages_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    before = json.dumps(messages)
    for source in (CHATML, PARTS):
        templates(source).render(messages, continue_final_message=True)
    assert json.dumps(messages) == before


def test_tokenizer_without_named_tokens_renders():
    tokenizer = Tokenizer(TokenizerParts(byte_level("qwen2"), chat_templates={"default": CHATML}))
    assert tokenizer.encode_chat([USER])[0] == 1
