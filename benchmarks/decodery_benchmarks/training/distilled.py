"""Let a small encoder-decoder learn from a decoder alone, on what the small one writes itself.

Return of the Encoder: Maximizing Parameter Efficiency for SLMs (2025). The student draws texts of its sources; the
teacher reads each source with such a text after it and says what it would have written at every place; both say the
token after the same beginning, so that their places align one to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.batch import Batch, Segment
from decodery.models.protocol import LanguageModel
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery_benchmarks.puzzles.alphabet import END_ID, VOCABULARY, tokenizer

from .one_stack import BEHIND
from .two_stacks import predicted, predicted_from, read


@dataclass(frozen=True)
class DistillationRecipe:
    """How a student learns from a teacher.

    Attributes:
        share: Of KL(teacher || student) along the student's own texts in the loss; the rest is the loss on right texts.
        temperature, top_k: Of what the student draws.
    """

    share: float = 0.9
    temperature: float = 0.9
    top_k: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not self.temperature > 0 or self.top_k < 1:
            raise SettingsError("distillation needs a share from 0 to 1, a temperature above 0 and top_k of at least 1")


def check_teacher(model: LanguageModel, vocabulary: str) -> None:
    """Raise SettingsError for a teacher whose tokens are others than the student's."""
    if model.vocab_size != VOCABULARY or vocabulary != tokenizer().fingerprint():
        raise SettingsError(
            "this teacher has another vocabulary than the student: make one with `python "
            "benchmarks/train.py seq2seq KIND --one-stack --out teacher`"
        )


@torch.no_grad()
def drawn(
    model: EncoderDecoder, given: torch.Tensor, most: int, how: DistillationRecipe, chance: torch.Generator
) -> torch.Tensor:
    """[b, <= most] int64 texts that a model draws of sources [b, n], each with its end, -1 after that.

    A text that comes to no end within `most` tokens stays without one.
    """
    source = read(model, given)
    written = torch.full((len(given), 1), model.config.start_id, dtype=torch.int64, device="cpu")
    running = torch.ones(len(given), dtype=torch.bool, device="cpu")
    for _ in range(most):
        logits = predicted_from(model, source, written.clamp(min=0))[:, -1] / how.temperature
        least = logits.topk(min(how.top_k, logits.shape[1]), dim=1).values[:, -1:]
        law = logits.masked_fill(logits < least, -torch.inf).softmax(dim=1)
        token = law.multinomial(1, generator=chance)[:, 0].masked_fill(~running, -1)
        written = torch.cat((written, token[:, None]), dim=1)
        running = running & (token != END_ID)
        if not running.any():
            break
    return written[:, 1:]


@torch.no_grad()
def said(teacher: LanguageModel, given: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """[k, vocab] log-probabilities a decoder gives the tokens of texts [b, m], in order, -1 left out."""
    segments = []
    separator = tokenizer().encode(BEHIND)
    for source, text in zip(given.tolist(), texts.tolist(), strict=True):
        ask = [*(each for each in source if each >= 0), *separator]
        told = [each for each in text if each >= 0]
        row = np.asarray([*ask, *told[:-1]], dtype=np.int64)
        # The row before a token says it: the first token's is the last one of what is asked.
        segments.append(Segment(np.arange(len(row)), row, logit_rows=range(len(ask) - 1, len(row))))
    return teacher.forward(Batch(segments)).logits.float().log_softmax(dim=-1)


def distance(student: EncoderDecoder, given: torch.Tensor, texts: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher || student) in nats over the tokens of texts [b, m], -1 left out, with gradients.

    Args:
        teacher: [k, vocab], see `said`.
    """
    begin = torch.full((len(texts), 1), student.config.start_id, dtype=torch.int64, device="cpu")
    behind_begin = torch.cat((begin, texts[:, :-1].clamp(min=0)), dim=1)
    own = predicted(student, given, behind_begin)[texts >= 0].log_softmax(dim=-1)
    return (teacher.exp() * (teacher - own)).sum(dim=-1).mean()
