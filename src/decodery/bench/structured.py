"""Structured output as JSONSchemaBench measures it: which schemas are supported, what was written, what masks cost.

Source: Generating Structured Outputs from Language Models: Benchmark and Studies (2025).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from decodery.core.errors import ConstraintError, SettingsError
from decodery.llm.llm import LLM
from decodery.sampling.constraint import Constraint

from .settings import Settings
from .workloads import questions

if TYPE_CHECKING:
    from .record import Record

WORKLOAD = "jsonschema"
_FEW = 40
_MOST_DIGITS = 2000


@dataclass(frozen=True)
class Schema:
    """One schema of the set. question: whose; seconds: its compilation took; refused: why it could not be enforced."""

    question: str
    category: str
    seconds: float
    refused: str = ""
    constraint: Constraint | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the result file keeps it."""
        return {
            "question": self.question,
            "category": self.category,
            "seconds": round(self.seconds, 6),
            "refused": self.refused,
        }


def compile_schemas(lm: LLM, settings: Settings) -> list[Schema]:
    """Every schema the benchmark asks for, compiled where that is possible; none without the workload."""
    if WORKLOAD not in settings.workloads:
        return []
    from decodery.constraints.json_schema import JSONSchema

    data = None if settings.data is None else Path(settings.data)
    found = []
    # The first use of a vocabulary reads all of it, which no later one does.
    JSONSchema(True).compile(lm.vocabulary)
    for question in questions(WORKLOAD, data, settings.prompts or _FEW):
        begin = perf_counter()
        try:
            constraint: Constraint | None = JSONSchema(question.schema).compile(lm.vocabulary)
            refused = ""
        except ConstraintError as error:
            constraint, refused = None, str(error)
        found.append(Schema(question.id, question.category, perf_counter() - begin, refused, constraint))
    return found


def is_valid(schema: str, text: str) -> bool:
    """Whether `text` is JSON that is valid under the schema, formats included, by the package `jsonschema`.

    Numbers are compared exactly, as decimals; a text is not valid where that takes more than 2,000 digits, such as the
    remainder of 1e9999 by 3, or an exponent no decimal has. Nothing is fetched.
    """
    try:
        import jsonschema
        import jsonschema_specifications
    except ImportError as error:
        raise SettingsError("checking JSON needs jsonschema: run `pip install 'decodery[constrain]'`") from error
    try:
        parsed = json.loads(schema, parse_float=Decimal)
        validator = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
        judge = validator(parsed, format_checker=validator.FORMAT_CHECKER, registry=jsonschema_specifications.REGISTRY)
        with localcontext(prec=_MOST_DIGITS):
            return judge.is_valid(json.loads(text, parse_float=Decimal, parse_constant=_refuse))
    except (ValueError, RecursionError, InvalidOperation):
        return False


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def judged(lm: LLM, schema: str, output: Sequence[int], mask_seconds: float) -> dict[str, Any]:
    """What became of one schema: whether the text ended by itself, and whether it is valid."""
    finished = bool(output) and output[-1] in lm.tokenizer.eos_ids
    valid = is_valid(schema, lm.tokenizer.decode(output))
    return {"finished": finished, "valid": valid, "mask_seconds": round(mask_seconds, 7)}


def figures(records: Sequence[Record], schemas: Iterable[Schema]) -> dict[str, Any]:
    """A row's figures of structured output. schemas: all that were tried, refused ones among them.

    declared: share of schemas that compiled. compliance: share of those whose text is valid; a text cut by its length
    is not. coverage: share of all schemas whose text is valid. finished: share of texts that ended by themselves;
    sound: share of these that are valid. compile_seconds, first_token_seconds: medians; the latter with compilation.
    mask_share: part of the decoding time that masks took.
    """
    tried = list(schemas)
    compiled = {schema.question: schema.seconds for schema in tried if not schema.refused}
    seen = [(record, record.structured) for record in records if record.structured is not None]
    if not tried or not seen:
        return {}
    declared = len(compiled) / len(tried)
    compliance = sum(facts["valid"] for _, facts in seen) / len(seen)
    ended = [facts["valid"] for _, facts in seen if facts["finished"]]
    tokens = sum(record.new_tokens[0] for record, _ in seen)
    seconds = sum(record.seconds[0] for record, _ in seen)
    first = [compiled[record.prompt.question] + record.prefill_seconds[0] for record, _ in seen]
    return {
        "schemas": len(tried),
        "declared": round(declared, 4),
        "coverage": round(declared * compliance, 4),
        "compliance": round(compliance, 4),
        "finished": round(len(ended) / len(seen), 4),
        "sound": round(sum(ended) / len(ended), 4) if ended else None,
        "compile_seconds": round(median(compiled.values()), 6),
        "first_token_seconds": round(median(first), 4),
        "seconds_per_token": round(seconds / tokens, 6) if tokens else None,
        "mask_share": round(sum(facts["mask_seconds"] for _, facts in seen) / seconds, 4) if seconds else None,
    }


HEAD = (
    *("dataset", "method", "schemas", "declared", "coverage", "compliance"),
    *("finished, valid", "compile", "first token", "per token", "masks"),
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row's figures under `HEAD`."""
    percent = {name: f"{100 * row[name]:.0f} %" for name in ("declared", "coverage", "compliance", "finished")}
    sound = "" if row["sound"] is None else f"{100 * row['sound']:.0f} %"
    per_token = "" if row["seconds_per_token"] is None else f"{1e3 * row['seconds_per_token']:.1f} ms"
    return [
        row["category"].replace("_", " "),
        row["method"],
        str(row["schemas"]),
        *(percent["declared"], percent["coverage"], percent["compliance"], f"{percent['finished']}, {sound}"),
        f"{1e3 * row['compile_seconds']:.1f} ms",
        f"{1e3 * row['first_token_seconds']:.0f} ms",
        per_token,
        "" if row["mask_share"] is None else f"{100 * row['mask_share']:.1f} %",
    ]
