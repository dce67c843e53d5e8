"""Chat templates, rendered in a sandbox, and the text that new messages add to a history that must not change.

A model's template writes a whole conversation. A token history, however, is append-only: what the engine sampled stays as it is, whatever
the template would make of it (templates trim, drop reasoning, close turns). So an assistant's turn is rendered as a placeholder, and what a
template writes *behind* the last placeholder is what new messages add. A template that would write the part before it differently once
more messages follow cannot be used this way, and is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headway.errors import ConfigError, StorageError
from headway.formats.bounded import read_bounded

Message = Mapping[str, Any]
MAX_FILE_BYTES = 64 * 1024**2  # tokenizer_config.json may list every added token
MAX_TEMPLATE_CHARACTERS = 1024**2
_LONGEST_MESSAGE = 300
PLACEHOLDER = "\u2402sampled\u2403"  # control pictures: no template trims, splits or escapes them


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's text in some templates; it is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Hugging Face chat template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(f"the model's chat template has {len(source)} characters: at most {MAX_TEMPLATE_CHARACTERS} are read")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # -- parser and compiler meet what they will: nesting without end, names that Python cannot compile
            raise ConfigError(f"the model's chat template cannot be read: {_line(error)}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, now: datetime | None = None) -> str:
        """Return the messages as text, as at `now` (unset: now). Raises `ConfigError` with what the template says against them."""
        at = now or datetime.now()  # noqa: DTZ005 -- templates want local time
        given = {"strftime_now": lambda form: at.strftime(form[:100]), **self._special_tokens}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **given)
        except Exception as error:  # -- the boundary around a program that nobody has read
            raise ConfigError(f"the model's chat template refuses these messages: {_line(error)}") from error

    def added_text(self, before: Sequence[Message], after: Sequence[Message]) -> str:
        """Return what `after`, a conversation with further messages, adds to the text of `before`, the same one without them.

        `before` is rendered with a generation prompt, so that an assistant's text follows; `after` has a placeholder there. Both at one
        time: many templates write the date, and it may become another day. Raises `ConfigError` when the template does not let a history
        stand.
        """
        now = datetime.now()  # noqa: DTZ005 -- as `render`
        begins = self.render(before, add_generation_prompt=True, now=now)
        whole = self.render(after, add_generation_prompt=True, now=now)
        _, found, added = whole.rpartition(PLACEHOLDER)
        if not found or not whole.startswith(begins):
            raise ConfigError(
                "the model's chat template rewrites earlier text when messages follow, so a history cannot be appended to: "
                "append text or ids instead of messages, or give the model a template that only adds"
            )
        return added


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """Return the chat template of a checkpoint directory, or None: a file of its own, or the default one in tokenizer_config.json."""
    config = _read_json(directory / "tokenizer_config.json")
    source: Any = _read_text(directory / "chat_template.jinja")
    if source is None:
        source = _read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}.get("default")
    if source and not isinstance(source, str):
        raise ConfigError(f"{directory}: its chat_template is no text: save its tokenizer again")
    return ChatTemplate(source, _special_tokens(config)) if source else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in config.items() if name.endswith("_token")}
    return {name: value for name, value in tokens.items() if isinstance(value, str)}


def _read_json(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _read_text(file: Path) -> str | None:
    """Return the text of a file, None where there is none. Raises `ConfigError`."""
    try:
        return read_bounded(file, MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, StorageError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:  # noqa: FBT001, FBT002 -- as templates call it
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    """Return what an error says as one short line: a template may have written it."""
    line = " ".join((str(error) or type(error).__name__)[: 2 * _LONGEST_MESSAGE].split())
    return line[:_LONGEST_MESSAGE]
