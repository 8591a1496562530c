"""Rendering of a chat template: the Jinja dialect that checkpoints are written in.

Owns the sandbox and the check of messages. Never sees a token id.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(
    template: str, messages: Sequence[Mapping[str, Any]], **variables: Any
) -> str:
    """The text of a conversation under `template`.

    Args:
      template: Jinja source, trusted with nothing but its variables.
      messages: each a mapping with a "role" and a "content", both strings; other keys
        go to the template as they are.
      **variables: what else the template may read, such as `bos_token`. `tools` and
        `documents` are None unless given: templates ask whether they are.

    Raises ValueError naming the message and field that are wrong, or with the words of
    the template if it refuses the conversation.
    """
    check_messages(messages)
    try:
        known = {"tools": None, "documents": None, **variables}
        return _compiled(template).render(messages=list(messages), **known)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError, naming message and field, unless this is a conversation."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(
        messages, Sequence
    ):
        raise ValueError(
            f"messages must be a list of messages, not {type(messages).__name__}; "
            'give [{"role": "user", "content": "..."}]'
        )
    if not messages:
        raise ValueError("messages is empty; give at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where}={message!r} must be a mapping")
        for field in ("role", "content"):
            if field not in message:
                raise ValueError(f"{where} lacks {field!r}; it has {sorted(message)}")
            value = message[field]
            if not isinstance(value, str):
                raise ValueError(f"{where}[{field!r}]={value!r} must be a string")
        if not message["role"]:
            raise ValueError(f"{where}['role'] is empty; use 'user' or 'assistant'")


class _Generation(Extension):
    """`{% generation %}` marks what a training run would learn; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
