"""`/v1/rerank` and `/score`: how well documents fit a query, by a scorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictBool, StrictStr

from decodery.core.registry import resolve
from decodery.engine.calls import Calls
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.scorer import Candidates, Scorer, judge

from .dialect import Rewritten
from .errors import invalid
from .fields import SPEC, Body
from .job import FinishedText
from .plan import Plan, ReadForm
from .reading import Reading
from .request_preprocessor import RequestPreprocessor
from .sampler_fields import WHOLE

_MOST_TEXTS = 2048
_LEAST = -9999.0
"""The score of what is impossible, for which JSON has no number."""
_Text = Annotated[StrictStr, Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=_MOST_TEXTS)]


class ScoringMethods(BaseModel):
    """The scorer by name, with settings; the server's by default."""

    model_config = ConfigDict(extra="forbid")

    scorer: SPEC | None = None


class Document(BaseModel):
    """A document as an object."""

    text: _Text


class RerankRequest(Body):
    """`POST /v1/rerank`, as Jina, Cohere and vLLM have it.

    Attributes:
        top_n: How many of the best are returned; all by default.
        return_documents: Return the texts as well.
        max_tokens_per_doc: Read only so many tokens of each document, its first ones; all by default.
    """

    model: StrictStr | None = None
    query: _Text
    documents: Annotated[list[_Text | Document], Field(min_length=1, max_length=_MOST_TEXTS)]
    top_n: Annotated[int, Field(strict=True, ge=1), WHOLE] | None = None
    return_documents: StrictBool | None = None
    max_tokens_per_doc: Annotated[int, Field(strict=True, ge=1), WHOLE] | None = None
    decodery: ScoringMethods | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Query and document of every score."""
        return [(self.query, each if isinstance(each, str) else each.text) for each in self.documents]


class ScoreRequest(Body):
    """`POST /score`, as vLLM has it.

    Attributes:
        text_1: A query for all documents, or one for each.
        text_2: The documents.
    """

    model: StrictStr | None = None
    text_1: _Text | _Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: _Text | _Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))
    decodery: ScoringMethods | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Query and document of every score. Raises ApiError."""
        queries, documents = ([each] if isinstance(each, str) else each for each in (self.text_1, self.text_2))
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise invalid(
                f"text_1 has {len(queries)} texts and text_2 {len(documents)}: give one, or as many as text_2", "text_1"
            )
        return list(zip(queries, documents, strict=True))


@dataclass(eq=False, kw_only=True)
class Scoring(Reading):
    """A document that is scored.

    Attributes:
        scorer: What scores it, bound to the model's tokenizer.
        request: The query.
        document: Its text.
    """

    scorer: Scorer
    request: Request
    document: str

    def read(self, engine: Engine) -> ForwardCoroutine[list[float]]:
        self.request.cache_namespace = self.cache_namespace
        assert self.request.conversation is not None
        query = self.request.prompt
        candidates = Candidates(
            query,
            [self.prompt[len(query) :]],
            [True],
            texts=[self.document],
            model=engine.model,
            calls=Calls(engine, self.request, self.request.conversation),
        )
        found = yield from judge(self.scorer, candidates)
        return [max(float(found[0]), _LEAST)]


def plan(preprocessor: RequestPreprocessor, body: RerankRequest | ScoreRequest) -> Plan:
    """The documents of a request, each to be scored.

    Raises:
        ApiError: For a scorer that cannot be used, and for a text that is too long.
    """
    lm, named = preprocessor.lm, None if body.decodery is None else body.decodery.scorer
    scorer: Scorer = resolve("scorer", named or preprocessor.settings.scorer).bind(lm.tokenizer)
    scorer.fits(lm.model)
    if scorer.writes:
        raise invalid(
            "this scorer writes texts of its own for each document: rerank with one that reads, such as "
            "question-likelihood",
            "decodery.scorer",
        )
    most = body.max_tokens_per_doc if isinstance(body, RerankRequest) else None
    found: list[Scoring] = []
    pairs, at_once = body.pairs, preprocessor.settings.max_texts
    if len(pairs) > at_once:
        # Each of them has the query, which may be as long as a context.
        raise invalid(f"this request has {len(pairs)} documents, and one may have {at_once}: give fewer", "documents")
    for query, document in pairs:
        preprocessor.check_length(query)
        preprocessor.check_length(document)
        request = lm.request_for(query, drafter=None)
        read = lm.tokenizer.encode_after(document)
        if most is not None and len(read) > most:
            read = read[:most]
            document = lm.tokenizer.decode(read)
        tokens = [*request.prompt, *read]
        preprocessor.room(len(tokens), None, 1)
        found.append(Scoring(tokens, scorer=scorer, request=request, document=document))
    prefix = "rerank-" if isinstance(body, RerankRequest) else "score-"
    return Plan(found, 1, ReadForm(prefix, _score))


def _score(index: int, text: FinishedText) -> dict[str, Any]:
    return {"index": index, "object": "score", "score": text.vector[0]}


def written(body: RerankRequest | ScoreRequest) -> Rewritten:
    """The form of the answer."""

    def rerank(answer: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(body, RerankRequest)
        ordered: Sequence[dict[str, Any]] = sorted(answer["choices"], key=lambda each: -each["score"])
        results = []
        for each in ordered[: body.top_n]:
            result = {"index": each["index"], "relevance_score": each["score"]}
            if body.return_documents is not False:
                result["document"] = {"text": body.pairs[each["index"]][1]}
            results.append(result)
        return {"id": answer["id"], "model": answer["model"], "usage": _usage(answer), "results": results}

    def scores(answer: dict[str, Any]) -> dict[str, Any]:
        head = {"id": answer["id"], "object": "list", "created": answer["created"], "model": answer["model"]}
        return {**head, "data": answer["choices"], "usage": _usage(answer)}

    return Rewritten(rerank if isinstance(body, RerankRequest) else scores)


def _usage(answer: dict[str, Any]) -> dict[str, int]:
    tokens = answer["usage"]["prompt_tokens"]
    return {"prompt_tokens": tokens, "total_tokens": tokens}
