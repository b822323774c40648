"""`/v1/embeddings`: what the model's last layer makes of texts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, StrictStr

from decodery.engine.engine import Engine
from decodery.models.batch import Segment
from decodery.models.protocol import OpenModel, is_open
from decodery.step.forward_request import ForwardCoroutine, score

from .errors import invalid
from .fields import Body, Tokens
from .job import FinishedText
from .plan import Plan, ReadForm
from .reading import Reading
from .request_preprocessor import RequestPreprocessor
from .sampler_fields import WHOLE

_MOST_TEXTS = 2048
_ROWS = 128
"""Rows of a text in one pass."""


class EmbeddingsRequest(Body):
    """`POST /v1/embeddings`.

    Attributes:
        dimensions: How many of a vector's first numbers are returned, scaled to length 1 again.
        pooling: The mean over all tokens, or the last token's state.
    """

    model: StrictStr | None = None
    input: (
        Annotated[StrictStr, Field(min_length=1)]
        | Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(min_length=1, max_length=_MOST_TEXTS)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=_MOST_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(strict=True, ge=1), WHOLE] | None = None
    pooling: Literal["mean", "last"] = "mean"


@dataclass(eq=False, kw_only=True)
class Embedding(Reading):
    """A text of which one vector is wanted.

    Attributes:
        model: What reads it.
        pooling: "mean" or "last".
    """

    model: OpenModel
    pooling: str

    def read(self, engine: Engine) -> ForwardCoroutine[list[float]]:
        """The vector [hidden] of length 1, from the states after the final norm."""
        model = self.model
        cache = model.new_cache()
        total = torch.zeros(model.config.hidden_size, dtype=torch.float64, device="cpu")
        for first in range(0, len(self.prompt), _ROWS):
            rows = self.prompt[first : first + _ROWS]
            found = yield from score(model, Segment.chunk(rows, cache, []), taps=[-1])
            cache.keep(range(len(rows)))
            states = model.final_norm(found.hidden[-1]).double().cpu()
            total = states[-1] if self.pooling == "last" else total + states.sum(dim=0)
        vector: list[float] = torch.nn.functional.normalize(total, dim=0).tolist()
        return vector


def plan(preprocessor: RequestPreprocessor, body: EmbeddingsRequest) -> Plan:
    """The texts of a request, of each of which a vector is wanted.

    Raises:
        ApiError: For one that is too long, has tokens the model lacks, or none.
    """
    lm, given = preprocessor.lm, body.input
    if body.dimensions is not None and body.dimensions > lm.model.config.hidden_size:
        raise invalid(f"this model's vectors have {lm.model.config.hidden_size} dimensions", "dimensions")
    if not is_open(lm.model):
        raise invalid("this model gives no hidden states: serve one that this package runs itself", "model")
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    found = []
    for each in several:
        if isinstance(each, str):
            preprocessor.check_length(each)
        tokens = lm.tokenizer.encode(each) if isinstance(each, str) else list(each)
        if not tokens or max(tokens) >= lm.model.vocab_size:
            raise invalid(f"a text has no tokens, or tokens beyond the vocabulary of {lm.model.vocab_size}", "input")
        preprocessor.room(len(tokens), None, 1)
        found.append(Embedding(tokens, model=lm.model, pooling=body.pooling))

    def item(index: int, text: FinishedText) -> dict[str, Any]:
        return {"object": "embedding", "index": index, "embedding": _written(body, text.vector)}

    return Plan(found, 1, ReadForm("embd-", item))


def vectors(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request for vectors."""
    tokens = answer["usage"]["prompt_tokens"]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": answer["choices"], "model": answer["model"], "usage": usage}


def _written(body: EmbeddingsRequest, vector: Sequence[float]) -> list[float] | str:
    """A vector as the request wants it."""
    found = torch.tensor(vector, dtype=torch.float64, device="cpu")
    if body.dimensions is not None:
        found = torch.nn.functional.normalize(found[: body.dimensions], dim=0)
    if body.encoding_format == "float":
        numbers: list[float] = found.tolist()
        return numbers
    return base64.b64encode(found.float().numpy().astype("<f4").tobytes()).decode("ascii")
