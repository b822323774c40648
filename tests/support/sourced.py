"""Texts of two tiny models, with and without a source of logits, and the logits that reading all of one anew gives."""

from __future__ import annotations

import torch

from decodery.models.batch import Segment
from decodery.models.protocol import LanguageModel
from decodery.step.forward_request import run_sync, score
from decodery.step.logits_source import LogitsSource
from decodery.testing import decode, tiny_transformer

TARGET, OTHER = tiny_transformer(0), tiny_transformer(0, num_layers=1)
PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4, [11]]


def logits_after(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """[vocab] after `tokens`, all of them read anew."""
    segment = Segment.chunk(tokens, model.new_cache(), logit_rows=[len(tokens) - 1])
    return run_sync(score(model, segment)).logits[0]


def text(
    source: LogitsSource | None, prompt: list[int] = PROMPTS[0], model: LanguageModel = TARGET, n: int = 40
) -> list[int]:
    return decode(model, [prompt], logits_source=source, max_new_tokens=n)[0].generated
