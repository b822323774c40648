"""`/v1/embeddings`: what the model's last layer makes of texts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field, StrictStr

from decodery.models.batch import Segment
from decodery.models.protocol import OpenModel, is_open
from decodery.step.forward_request import ForwardCoroutine, score

from .errors import invalid
from .fields import Body, Tokens
from .sampler_fields import WHOLE

if TYPE_CHECKING:
    from .request_preprocessor import RequestPreprocessor

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


@dataclass(eq=False)
class Reading:
    """A text of which one vector is wanted.

    Attributes:
        model: What reads it.
        prompt: Its tokens.
        pooling: "mean" or "last".
        cache_namespace: Whose it is.
    """

    model: OpenModel
    prompt: Sequence[int]
    pooling: str
    cache_namespace: str = ""

    def read(self) -> ForwardCoroutine[list[float]]:
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


def readings(preprocessor: RequestPreprocessor, body: EmbeddingsRequest) -> list[Reading]:
    """The texts of a request.

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
        found.append(Reading(lm.model, tokens, body.pooling))
    return found


def vector_of(body: EmbeddingsRequest, vector: Sequence[float]) -> list[float] | str:
    """A vector as the request wants it."""
    found = torch.tensor(vector, dtype=torch.float64, device="cpu")
    if body.dimensions is not None:
        found = torch.nn.functional.normalize(found[: body.dimensions], dim=0)
    if body.encoding_format == "float":
        numbers: list[float] = found.tolist()
        return numbers
    return base64.b64encode(found.float().numpy().astype("<f4").tobytes()).decode("ascii")
