"""Chat messages to one prompt, by the model's own Jinja template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

Message = Mapping[str, Any]

# The trailing space shows whether the template strips what it prints.
_CONTINUE_HERE = "\ue000CONTINUE-HERE\ue000 "
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplates:
    """The chat templates of one tokenizer.

    Args:
        templates: Jinja sources by name; the usual one is called "default".
        named_tokens: what templates know as bos_token, eos_token and so on.
        override: used instead of all: a file's path, a template's text, or the name of one of `templates`.

    Raises:
        ValueError: `override` is none of these, or not a Jinja template.
    """

    def __init__(
        self, templates: Mapping[str, str], named_tokens: Mapping[str, str], *, override: str | None = None
    ) -> None:
        self._sources = dict(templates)
        self._named_tokens = dict(named_tokens)
        self._compiled: dict[str, _CompiledTemplate] = {}
        if override is not None:
            self._sources = {"default": self._sources.get(override) or _read_override(override, self._sources)}
            self._template("default")

    @property
    def sources(self) -> Mapping[str, str]:
        """The templates' texts by name."""
        return self._sources

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt.

        Args:
            messages: {"role": ..., "content": ...}; content is a string, a list of text parts, or None.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: whether to end with the opening of an assistant message. None: yes, unless
                `continue_final_message`.
            continue_final_message: leave the last message open, for the model to go on with it.
            chat_template: the name of a template. None: "tool_use" if there are tools and it exists, else "default".
            **template_kwargs: variables for the template, as `enable_thinking=False`.

        Raises:
            ValueError: there is no template, the messages are malformed, or the template refuses them.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message must not both be true: the first opens a new "
                "message, the second goes on with the last; set one to false"
            )
        template = self._template(self._choose(chat_template, tools))
        chat = [_normalize(message, template) for message in _check(messages, "message")]
        if not chat:
            raise ValueError("messages must have at least one message, got none: add one with role 'user'")
        final = _mark_end(chat[-1]) if continue_final_message else None
        variables = {
            "documents": None,
            **self._named_tokens,
            **template_kwargs,
            "messages": chat,
            "tools": _check(tools, "tool") if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = template.render(variables)
        return text if final is None else _cut_at_mark(text, final)

    def _choose(self, name: str | None, tools: object) -> str:
        if not self._sources:
            raise ValueError(
                "chat needs a chat template and this model has none: pass --chat-template with a Jinja file, or use "
                "plain completion"
            )
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(
                f"chat_template must be one of {', '.join(map(repr, sorted(self._sources)))}, got {name!r}: "
                "choose one by name, or pass --chat-template with a Jinja file"
            )
        return name

    def _template(self, name: str) -> _CompiledTemplate:
        if name not in self._compiled:
            self._compiled[name] = _CompiledTemplate(self._sources[name])
        return self._compiled[name]


def _read_override(override: str, names: Mapping[str, str]) -> str:
    if "{{" in override or "{%" in override:
        return override
    path = Path(override).expanduser()
    if not path.is_file():
        also = f", or one of this model's templates ({', '.join(sorted(names))})" if names else ""
        raise ValueError(
            f"chat_template must be a Jinja file or a template's text{also}, got {override!r}: check the path"
        )
    return path.read_text(encoding="utf-8")


class _CompiledTemplate:
    """One template, and what form of content it reads."""

    def __init__(self, source: str) -> None:
        import jinja2
        from jinja2 import nodes

        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template: Template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template must be valid Jinja, got an error in line {error.lineno}: {error.message}; "
                "pass --chat-template with one that is"
            ) from None
        loops = any(_is_content(node.iter) for node in tree.find_all(nodes.For))
        tests = {test.name for test in tree.find_all(nodes.Test) if _is_content(test.node)}
        self.reads_parts = loops
        """It goes through content part by part, so a list of parts may reach it."""
        self.needs_parts = loops and not tests & {"string", "iterable", "sequence", "mapping"}
        """It knows no other form, and would go through a string letter by letter."""
        self.knows_none = "none" in tests
        """It asks whether content is none, so None must reach it as it is."""
        self.reads_arguments = _reads_arguments(tree)
        """It needs a tool call's arguments as an object; else it prints their JSON text."""

    def render(self, variables: dict[str, Any]) -> str:
        import jinja2

        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not accept these messages: {error.message or error}") from None
        except Exception as error:  # a template is a program: with a wrong message anything may happen in it
            raise ValueError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}; "
                "check that they have the roles and fields that this model knows"
            ) from None


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is `message.content`, `message['content']`, or a variable named after it."""
    from jinja2 import nodes

    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _reads_arguments(tree: nodes.Template) -> bool:
    """Whether a template takes a tool call's arguments apart or writes JSON from them, and so must not get a string.

    One that asks whether they are a string can print them to the letter, unless it takes them apart all the same.
    """
    from jinja2 import nodes

    names = {"arguments"}

    def are_arguments(node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Or):  # arguments or {}
            return are_arguments(node.left)
        if isinstance(node, nodes.Call):  # call.get("arguments")
            first = node.args[0] if node.args else None
            return isinstance(first, nodes.Const) and first.value == "arguments"
        if isinstance(node, nodes.Getattr):
            return node.attr == "arguments"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"
        return isinstance(node, nodes.Name) and node.name in names

    if not any(are_arguments(node) for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call))):
        return True  # it writes whole calls as JSON, if it knows them at all
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and are_arguments(assigned.node):
            names.add(assigned.target.name)
    filters = {node.name for node in tree.find_all(nodes.Filter) if are_arguments(node.node)}
    tests = {node.name for node in tree.find_all(nodes.Test) if are_arguments(node.node)}
    methods = {node.attr for node in tree.find_all(nodes.Getattr) if are_arguments(node.node)}
    loops = any(are_arguments(node.iter) for node in tree.find_all(nodes.For))
    takes_apart = loops or filters & {"items", "dictsort"} or methods & {"items", "keys", "get"} or "mapping" in tests
    return bool(takes_apart or ("tojson" in filters and "string" not in tests))


def _environment() -> Environment:
    """Jinja as chat templates expect it: HF's settings, functions and filters."""
    import jinja2
    from jinja2 import ext, nodes, parser, sandbox

    class GenerationTag(ext.Extension):
        """{% generation %} marks text to train on; here it is only a scope."""

        tags = {"generation"}  # noqa: RUF012 (jinja's own attribute)

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.filters["tojson"] = tojson
    return environment


def _check(items: object, what: str) -> list[dict[str, Any]]:
    """Plain copies of JSON objects, so that a template cannot reach the caller's."""
    if isinstance(items, str | Mapping) or not isinstance(items, Sequence):
        raise ValueError(f"{what}s must be a list of objects, got {type(items).__name__}: put it in a list")
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"{what} {i} must be a JSON object, got {type(item).__name__}: {item!r}")
    copies: list[dict[str, Any]] = _plain(items)
    return copies


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _normalize(message: dict[str, Any], template: _CompiledTemplate) -> dict[str, Any]:
    """The message in the form that the template reads; keys that are null go, as most templates mistake them."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message must have a role, a string as 'user', got {message.get('role')!r}")
    content = _content(message.get("content"), template)
    message = {key: value for key, value in message.items() if value is not None} | {"content": content}
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _arguments(function["arguments"], template)
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is not None:  # templates disagree on its name
        message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
    return message


def _content(content: Any, template: _CompiledTemplate) -> Any:
    if content is None:
        if template.knows_none:
            return None
        return [] if template.needs_parts else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.needs_parts else content
    if not isinstance(content, list):
        raise ValueError(f"content must be a string, a list of text parts or null, got {type(content).__name__}")
    parts = [_text_part(part) for part in content]
    if template.reads_parts:
        return [{"type": "text", "text": text} for text in parts]
    return "\n".join(parts)


def _arguments(arguments: Any, template: _CompiledTemplate) -> Any:
    """A call's arguments as the template reads them; clients send them as JSON text."""
    if not template.reads_arguments:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments, strict=False) if arguments.strip() else {}
    except (ValueError, RecursionError):  # cut off by a limit, perhaps
        return arguments
    return read if isinstance(read, dict) else arguments


def _text_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(
            f"a content part must be {{'type': 'text', 'text': ...}}, got one of type {kind!r}: "
            "this model reads text only"
        )
    return text


def _mark_end(message: dict[str, Any]) -> str:
    """Mark where the last message's text ends, and return that text."""
    content = message["content"]
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _CONTINUE_HERE
        return text
    if not isinstance(content, str) or not content:
        raise ValueError(
            "continue_final_message needs text in the last message's content, got none: give it the beginning of the "
            "answer, or set add_generation_prompt instead"
        )
    message["content"] = content + _CONTINUE_HERE
    return content


def _cut_at_mark(text: str, final: str) -> str:
    before, mark, after = text.rpartition(_CONTINUE_HERE.rstrip())
    if not mark or final.strip() not in before:
        raise ValueError(
            "continue_final_message needs a chat template that prints the last message as it is, and this one changes "
            f"or drops it: {final!r}; set it to false"
        )
    return before if after.startswith(" ") else before.rstrip()
