"""Chat templates: from the turns of a conversation to the text a model was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..errors import CorruptFile, PromptError

if TYPE_CHECKING:
    import jinja2

    from .chat_sandbox import BoundedEnvironment

_MOST_SOURCE = 1 << 20
_MOST_STEPS = 1_000_000
_MOST_CHARACTERS = 1 << 27


class ChatTemplate:
    """A Jinja template that comes with a model and is not trusted.

    It runs in a sandbox, in which loops, calls, texts and numbers are bounded. special: texts of the special
    tokens it may name, such as {"bos_token": "<s>"}.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        if len(source) > _MOST_SOURCE:
            raise CorruptFile("the model's chat template is longer than any template: the model's files are damaged")
        self.source = source
        self.special = dict(special or {})
        self._lock = Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for these messages ({"role": ..., "content": ...}).

        add_generation_prompt: end with what begins the model's turn. variables: further switches of the template.
        Raises PromptError where the template does not accept the messages.
        """
        import jinja2

        given = {**self.special, **variables, "messages": _plain(messages), "tools": _plain(tools)}
        given |= {"add_generation_prompt": add_generation_prompt, "documents": None}
        environment, template = self._compiled
        with self._lock:
            try:
                return environment.render(template, given)
            except jinja2.TemplateError as error:
                raise PromptError(f"the model's chat template refuses these messages: {error}") from error
            except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError, RecursionError) as error:
                raise PromptError(f"the model's chat template fails on these messages: {error}") from error

    @cached_property
    def _compiled(self) -> tuple[BoundedEnvironment, jinja2.Template]:
        import jinja2

        from .chat_sandbox import BoundedEnvironment

        environment = BoundedEnvironment(_MOST_STEPS, _MOST_CHARACTERS)
        try:
            return environment, environment.from_source(self.source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise CorruptFile(f"the model's chat template is not valid Jinja: {error}") from error


def _plain(value: Any) -> Any:
    """A copy of plain data, so that a template never gets hold of an object with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    raise PromptError(f"a chat message holds a {type(value).__name__}; only texts, numbers, lists and mappings can be")
