"""Constraint to the sentences of a context-free grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from decodery.core.errors import ConstraintError
from decodery.core.registry import register
from decodery.models.tokenizers.vocabulary import Vocabulary

from .base import ConstraintSpec, require_text
from .engine import GrammarConstraint
from .inhabited import require_text_of_grammar
from .lark import lark
from .schema import prepare

_ATTRIBUTES = re.compile(r"^\s*[?!]?[\w-]+\s*\[([^\]]*)\]\s*:", re.MULTILINE)
_IGNORED = re.compile(r"\b(stop|temperature)\b")
_PARTS = re.compile(
    r"""
    (?: \#|// ) [^\n]*                # a comment
    | " (?: \\. | [^"\\\n] )* "      # a literal
    | / (?: \\. | [^/\\\n] )+ /      # a regular expression
    | < [^<>\s]+ >                   # a special token
    | (?P<schema> %json\b \s* )
    """,
    re.VERBOSE,
)
"""Parts of a grammar in which `%json` is plain text, and the directive itself."""


@register(
    "grammar",
    paper="Grammar-Constrained Decoding for Structured NLP Tasks without Finetuning (2023)",
    guarantee="every finished text is a sentence of the grammar",
    texts=("rules",),
)
@dataclass(frozen=True)
class Grammar(ConstraintSpec):
    """Writes sentences of a context-free grammar.

    Terminals are regular expressions without look-around.

    Attributes:
        rules: Rules in Lark's syntax, with a rule `start`. `%json {...}` is a JSON schema, `%regex {...}` allows parts
            of a given text, and `<name>` is a special token.
    """

    rules: str

    def compile(self, vocabulary: Vocabulary) -> GrammarConstraint:
        require_text("grammar", self.rules)
        if self.rules.lstrip().startswith("{"):
            raise ConstraintError(
                "the grammar begins with '{' and has no rules, such as start: /[a-z]+/: give a JSON schema as one "
                "(json-schema)"
            )
        for attributes in _ATTRIBUTES.findall(self.rules):
            if found := _IGNORED.search(attributes):
                raise ConstraintError(
                    f"the grammar sets {found[0]!r} for a rule, which cannot be honoured: leave it out"
                )
        require_text_of_grammar(self.rules)
        return GrammarConstraint(vocabulary, lark(_with_schemas(self.rules), self.mode), stops=True)


def _with_schemas(rules: str) -> str:
    """The grammar with its JSON schemas converted to the form that the engine enforces in full."""
    done, at = [], 0
    while found := _PARTS.search(rules, at):
        if found["schema"] is None:
            done.append(rules[at : found.end()])
            at = found.end()
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(rules, found.end())
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the grammar has %json without a JSON schema after it: {error}") from error
        prepared = prepare(schema)
        whole = {"allOf": [prepared]} if isinstance(prepared, bool) else prepared
        done += [rules[at : found.end()], json.dumps(whole | {"x-guidance": {"json_allowed_escapes": 'nrbtf\\"'}})]
        at = end
    return "".join([*done, rules[at:]])
