"""The chat template of a folder: the text of a conversation, rendered by Jinja's sandbox as transformers renders it.

The template is `chat_template.jinja` beside the tokenizer.json, or `chat_template` in the tokenizer_config.json there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.data.files import read_at_most
from trainer.data.tokenizer_file import CONFIG_NAME, read_stated, stated_token
from trainer.errors import DataError

FILE_NAME = "chat_template.jinja"
GENERATION_MARKS = ("\U0010fffc", "\U0010fffd")
"""Private characters around what `{% generation %}` encloses, where a rendering is marked."""
_MAX_BYTES = 2**22
# Names under which a template knows the tokenizer's special tokens, where there are such.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TemplateRefuses(Exception):
    """A template can't render a conversation, or refuses to; says why, in the template's own words."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Args:
        source: in Jinja's language.
        tool_source: the template of conversations with tools, where the folder has one for these.
        variables: special tokens by the names that the template knows them by.
        place: the file that holds it, for messages.

    Raises:
        DataError: it is no template, or jinja2 isn't installed.
    """

    source: str
    tool_source: str | None
    variables: Mapping[str, Any]
    place: str
    _now: datetime = field(default_factory=datetime.now, repr=False)  # one day for all rows of a corpus
    _compiled: dict[tuple[str, bool], Any] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        for source in filter(None, (self.source, self.tool_source)):
            for marked in (False, True):
                self._compiled[source, marked] = self._compile(source, marked)

    @property
    def digest(self) -> str:
        """A hex digest of all that renderings depend on, beside the conversation and the date."""
        known = [self.source, self.tool_source, dict(self.variables)]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def tells_generation(self, *, with_tools: bool) -> bool:
        """True if the template says by `{% generation %}` what the assistant writes."""
        return _GENERATION_TAG.search(self._source_of(with_tools)) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        marks_generation: bool = False,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: the turns.
            tools: what the assistant may call.
            add_generation_prompt: end with the beginning of an assistant's turn.
            marks_generation: put `GENERATION_MARKS` around what the template says that the assistant writes.

        Raises:
            TemplateRefuses: the template raises an exception.
        """
        template = self._compiled[self._source_of(tools is not None), marks_generation]
        try:
            return template.render(
                **{
                    **self.variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # whatever its expressions raise
            kind = type(error).__name__
            raise TemplateRefuses(str(error) if kind == "TemplateError" else f"{kind}: {error}") from error

    def _source_of(self, with_tools: bool) -> str:
        return self.tool_source if with_tools and self.tool_source is not None else self.source

    def _compile(self, source: str, marks_generation: bool) -> Any:
        try:
            import jinja2
        except ImportError as error:
            raise DataError(
                f"{self.place}: chat templates need jinja2, which is not installed; "
                'run `pip install -e ".[data]"` in the clone'
            ) from error
        environment = _make_environment(marks_generation)
        environment.globals["strftime_now"] = self._now.strftime
        try:
            return environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{self.place}: not a chat template: line {error.lineno}: {error.message}; mend it, or set "
                "data.chat.template to another"
            ) from error


def find_chat_template(tokenizer_file: Path, path: str | None) -> ChatTemplate:
    """The template that belongs to a tokenizer.

    Args:
        tokenizer_file: the tokenizer.json, beside which the template and the names of special tokens are looked for.
        path: of another template; None: the tokenizer's own.

    Raises:
        DataError: there is none, or it can't be read.
    """
    stated = read_stated(tokenizer_file)
    variables: dict[str, Any] = {name: token for name in _SPECIAL_TOKENS if (token := stated_token(stated, name))}
    if additional := stated.get("additional_special_tokens"):
        variables["additional_special_tokens"] = [
            each["content"] if isinstance(each, dict) else each for each in additional
        ]
    file = tokenizer_file.with_name(FILE_NAME) if path is None else Path(path).expanduser()
    source = _read_template(file, is_needed=path is not None)
    if source is not None:
        return ChatTemplate(source, None, variables, str(file))
    file = tokenizer_file.with_name(CONFIG_NAME)
    own = stated.get("chat_template")
    named = {each.get("name"): each.get("template") for each in own} if isinstance(own, list) else {"default": own}
    default, of_tools = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        raise DataError(
            f"{tokenizer_file.parent} has no chat template: neither {FILE_NAME}, nor chat_template in {CONFIG_NAME}"
            + (f" named 'default' (it has {', '.join(map(str, named))})" if isinstance(own, list) else "")
            + "; put one there, or set data.chat.template to its path"
        )
    return ChatTemplate(default, of_tools if isinstance(of_tools, str) else None, variables, str(file))


def _read_template(path: Path, *, is_needed: bool) -> str | None:
    """The content of a template's file; None: there is no such file, and none is needed."""
    try:
        content = read_at_most(path, _MAX_BYTES)
        if content is None:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        return content.decode()
    except FileNotFoundError as error:
        if not is_needed:
            return None
        raise DataError(f"data.chat.template={str(path)!r} is no file; give the path of a Jinja template") from error
    except (OSError, ValueError) as error:
        raise DataError(f"the chat template {path} can't be read: {error}; mend it, or move it away") from error


def _make_environment(marks_generation: bool) -> Any:
    """Jinja's environment with what transformers gives to templates, but for the date."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    opened, closed = GENERATION_MARKS if marks_generation else ("", "")

    class GenerationTag(Extension):
        """`{% generation %}` … `{% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own name and type

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller: Any) -> str:
            return f"{opened}{caller()}{closed}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )  # Jinja's own filter escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
