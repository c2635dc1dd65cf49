"""The chat page: one document that runs nothing but itself, and its Markdown and event stream, run by Node."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.server import page

FOLDER = Path(page.__file__).parent
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


@pytest.fixture(scope="module")
def answer():
    app = FastAPI()
    app.include_router(page.router())
    return TestClient(app).get("/")


class Elements(HTMLParser):
    """Every element of a document, with its attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.found, self.inside, self.code = [], None, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.code.append((self.inside, data))


def test_the_policy_allows_the_pages_own_code_and_nothing_else(answer):
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    code = Elements(answer.text).code
    for tag in ("script", "style"):
        digests = [hashlib.sha256(text.encode()).digest() for kind, text in code if kind == tag]
        assert digests
        assert policy[f"{tag}-src"].split() == [f"'sha256-{base64.b64encode(d).decode()}'" for d in digests]


def test_nothing_comes_from_outside(answer):
    elements = Elements(answer.text).found
    for tag, attributes in elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,", tag
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}|@import|\burl\(['\"]?(?!path)", answer.text)


def test_model_text_cannot_become_markup(answer):
    scripts = "".join(text for tag, text in Elements(answer.text).code if tag == "script")
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert name not in scripts


def test_every_control_has_a_label_and_the_page_fits_a_phone(answer):
    elements = Elements(answer.text).found
    labelled = {attributes["for"] for tag, attributes in elements if tag == "label"}
    controls = {attributes["id"] for tag, attributes in elements if tag in ("input", "select", "textarea")}
    assert labelled == controls == {"model", "system", "temperature", "max-tokens", "key", "prompt"}
    assert ("html", {"lang": "en"}) in elements
    viewport = next(a for tag, a in elements if tag == "meta" and a.get("name") == "viewport")
    assert viewport["content"] == "width=device-width, initial-scale=1"


def test_the_pages_files_are_packaged():
    declared = (FOLDER.parents[2] / "pyproject.toml").read_text()
    for name in ("html", "css", "js"):
        assert f'"server/page/*.{name}"' in declared


# --- its functions


def run(file, expression, inputs):
    """`expression`, a JavaScript function, of each input."""
    command = [NODE, str(Path(__file__).parent / "page_scripts.js"), str(FOLDER / file), expression]
    done = subprocess.run(command, input=json.dumps(inputs), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MARKDOWN = {
    "": "",
    "plain": "<p>plain</p>",
    "two\nlines\n\nand more": "<p>two<br>lines</p><p>and more</p>",
    "# One\n### Three ###\ntext": "<h1>One</h1><h3>Three</h3><p>text</p>",
    "#no heading": "<p>#no heading</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "**b** *i* __b__ _i_ ~~d~~": ("<p><strong>b</strong> <em>i</em> <strong>b</strong> <em>i</em> <del>d</del></p>"),
    "***both***": "<p><strong><em>both</em></strong></p>",
    "**a *b***": "<p><strong>a <em>b</em></strong></p>",
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "**over\nlines**": "<p><strong>over<br>lines</strong></p>",
    "2 * 3 * 4 and a_b_c and ** x **": "<p>2 * 3 * 4 and a_b_c and ** x **</p>",
    "unclosed **bold and `code": "<p>unclosed **bold and `code</p>",
    r"\*not\* \# \`": "<p>*not* # `</p>",
    "use `a*b*` and ``x`y``": "<p>use <code>a*b*</code> and <code>x`y</code></p>",
    "**the `**kw` one**": "<p><strong>the <code>**kw</code> one</strong></p>",
    "```py\nif a < b:\n    **x**\n```\nend": ('<codeblock language="py">if a &lt; b:\n    **x**</codeblock><p>end</p>'),
    "```\nstill coming": '<codeblock language="">still coming</codeblock>',
    "~~~\n```\n~~~": '<codeblock language="">```</codeblock>',
    "````md\n```\n````": '<codeblock language="md">```</codeblock>',
    "- a\n- b\n": "<ul><li>a</li><li>b</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "* a\n  - b\n    - c\n* d": "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>",
    "1. a\n   ```\n   x\n   ```\n2. b": '<ol><li>a<codeblock language="">x</codeblock></li><li>b</li></ol>',
    "1. a\n\n2. b\n\ntext": "<ol><li>a</li><li>b</li></ol><p>text</p>",
    "- a\n  more\nlazy\n\n  para": "<ul><li>a<br>more<br>lazy<p>para</p></li></ul>",
    "- a\n1. b": "<ul><li>a</li></ul><ol><li>b</li></ol>",
    "> q\n> - a\n\nout": "<blockquote><p>q</p><ul><li>a</li></ul></blockquote><p>out</p>",
    "| a | b |\n|---|:-:|\n| 1 | `x\\|y` |\n| 2 |\nend": (
        '<div class="table"><table><thead><tr><th>a</th><th class="to-center">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="to-center"><code>x|y</code></td></tr>'
        '<tr><td>2</td><td class="to-center"></td></tr></tbody></table></div><p>end</p>'
    ),
    "a | b\n\n|---|": "<p>a | b</p><p>|---|</p>",
    "[t **b**](https://a.b/c_d(e))": '<p><a href="https://a.b/c_d(e)">t <strong>b</strong></a></p>',
    "[https://a.b](https://c.d)": '<p><a href="https://c.d">https://a.b</a></p>',
    "see https://a.b/c. Or (http://x.y)!": (
        '<p>see <a href="https://a.b/c">https://a.b/c</a>. Or (<a href="http://x.y">http://x.y</a>)!</p>'
    ),
    "![picture](https://a.b/c.png)": '<p><a href="https://a.b/c.png">picture</a></p>',
    "[x](javascript:alert) [y](data:text/html,z)": "<p>[x](javascript:alert) [y](data:text/html,z)</p>",
    "[x]( JaVaScRiPt:alert)": "<p>[x]( JaVaScRiPt:alert)</p>",
    '[x](https://a"onclick=b)': '<p><a href="https://a&quot;onclick=b">x</a></p>',
    "<script>x</script> <img src=x onerror=y> &lt;": (
        "<p>&lt;script&gt;x&lt;/script&gt; &lt;img src=x onerror=y&gt; &amp;lt;</p>"
    ),
}


def as_html(node):
    """A tree as the tests write it."""
    if isinstance(node, str):
        return escape(node, quote=False)
    tag, attributes, *children = node
    start = tag + "".join(f' {name}="{escape(str(value))}"' for name, value in attributes.items())
    inside = "".join(map(as_html, children))
    return f"<{start}>" if tag in ("br", "hr") else f"<{start}>{inside}</{tag}>"


@needs_node
def test_markdown():
    trees = run("markdown.js", "parseMarkdown", list(MARKDOWN))
    assert {text: "".join(map(as_html, tree)) for text, tree in zip(MARKDOWN, trees, strict=True)} == MARKDOWN


def nodes(tree):
    for node in tree:
        if isinstance(node, list):
            yield node
            yield from nodes(node[2:])


TAGS = "p h1 h2 h3 h4 h5 h6 hr br strong em del code codeblock ul ol li blockquote div table thead tbody tr th td a"


@needs_node
@settings(max_examples=15, deadline=None)
@given(st.lists(st.text(alphabet="ab1 .\n\t#*_`~>|:-+[]()!\\<&hHtps/\r", max_size=120), min_size=30, max_size=60))
def test_whatever_the_text_only_known_elements_with_safe_attributes_come_out(texts):
    for tree in run("markdown.js", "parseMarkdown", [*texts, *(f"[{t}](javascript:{t})" for t in texts)]):
        for tag, attributes, *_ in nodes(tree):
            assert tag in TAGS.split()
            assert attributes.keys() <= {"href", "class", "start", "language"}
            assert attributes.get("class", "table") in ("table", "to-right", "to-center")
            assert re.match(r"https?://\S|mailto:\S", attributes.get("href", "mailto:x"))


@needs_node
def test_no_text_takes_long():
    pieces = ["*", "**a ", "*a ", "_", "[", "[a](", "`", "` `` ", "* ` `` ", "> ", "- ", "|", "#", "# #", "~~a ", "1. "]
    pieces += ["\\", "a|\n", "  - a\n", "> > \n", "*a\n", "```\n", "|-\n", "a|b\n-|-\n", "http://a"]
    texts = [piece * 30_000 for piece in pieces]
    texts += ["\n".join(" " * (2 * i) + "- a" for i in range(300)), "[" * 30_000 + "](x)" * 30_000]
    expression = "(text) => { const start = Date.now(); parseMarkdown(text); return Date.now() - start; }"
    took = dict(zip(pieces, run("markdown.js", expression, texts), strict=False))
    assert max(took.values()) < 2000, took


EVENTS = ': ping\r\n\r\ndata: {"a": 1}\n\ndata:two\ndata: lines\n\nevent: x\r\ndata: é世\r\n\r\ndata: [DONE]\n\n'


@needs_node
def test_events_are_the_same_wherever_the_stream_is_cut():
    cut = [[EVENTS[:i], EVENTS[i:j], EVENTS[j:]] for i in range(len(EVENTS)) for j in range(i, len(EVENTS), 5)]
    expression = "(pieces) => { const s = new EventSplitter(); return pieces.flatMap((piece) => s.push(piece)); }"
    got = run("stream.js", expression, [*cut, list(EVENTS)])
    assert all(each == ['{"a": 1}', "two\nlines", "é世", "[DONE]"] for each in got)


def chunk(delta, finish_reason=None, **more):
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more})


READ = """([events, startedAt]) => {
  const reader = new AnswerReader(startedAt);
  for (const [data, now] of events) reader.take(data, now);
  return [reader.text, reader.reasoning, reader.problem(), reader.facts()];
}"""


@needs_node
def test_answers():
    opening, end = [chunk({"role": "assistant", "content": ""}), 5], [chunk({}, "stop"), 2000]
    usage = [json.dumps({"choices": [], "usage": {"completion_tokens": 21}}), 2000]
    thought = [chunk({"reasoning_content": "hm"}), 200], [chunk({"reasoning": "m"}), 300]
    cases = [
        [opening, *thought, [chunk({"content": "a"}), 700], [chunk({"content": "b"}), 1200], end, usage, ["[DONE]", 2]],
        [opening, [chunk({"content": "a"}), 150]],
        [opening, [chunk({"content": "a"}), 150], [json.dumps({"error": {"message": "no blocks", "code": 500}}), 160]],
        [opening, [chunk({"content": "a"}), 150], [chunk({}, "length"), 160], ["[DONE]", 160]],
        [["<html>", 1]],
        [opening, [chunk({}, "error"), 1]],
    ]
    got = run("stream.js", READ, [[case, 100] for case in cases])
    assert got == [
        ["ab", "hmm", None, "first token 100 ms · 20.0 tok/s · 21 tokens"],
        ["a", "", "The connection ended before the answer did.", "first token 50 ms · 1 token"],
        ["a", "", "no blocks", "first token 50 ms · 1 token"],
        ["a", "", None, "first token 50 ms · 1 token · cut at the limit"],
        ["", "", "The server sent something that is not JSON: <html>", ""],
        ["", "", "The server could not finish this answer.", ""],
    ]


@needs_node
def test_errors_are_shown_as_the_server_says_them():
    cases = [
        [401, json.dumps({"error": {"message": "wrong key", "type": "x"}})],
        [502, "<html>bad gateway</html>"],
        [500, ""],
        [422, json.dumps({"detail": "no such field"})],
    ]
    assert run("stream.js", "([status, body]) => errorText(status, body)", cases) == [
        "wrong key (HTTP 401)",
        "<html>bad gateway</html> (HTTP 502)",
        "HTTP 500",
        "no such field (HTTP 422)",
    ]
