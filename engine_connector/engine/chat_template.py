"""The text of a conversation, as the model's own Jinja template lays it out.

A template comes with a model and is not trusted: it runs in jinja2's sandbox, with what Hugging Face's templates may use
(`raise_exception`, `strftime_now`, `tojson` that keeps UTF-8, loop controls; whitespace around blocks trimmed).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvstore.core.errors import ConfigError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
"""For a model that has ChatML's control tokens and brings no template."""


class ChatTemplate:
    """A template with the names of the model's control tokens in it. Raises ConfigError when it is no Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as err:
            raise _cannot(err) from err

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation up to where the assistant's answer begins. Raises ConfigError with the template's complaint."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as err:
            raise _cannot(err) from err  # what expressions in a template raise


def _cannot(err: Exception) -> ConfigError:
    return ConfigError(
        f"messages: the model's chat template does not take them ({err})", field="messages", value=str(err)
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
