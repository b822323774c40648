"""Blockwise controlled decoding against what it should do, drawn one by one."""

from __future__ import annotations

import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.scorers.value_head import LinearValue, ValueHead
from decodery.search.controlled_blocks import ControlledBlocks
from decodery.step.scorer import Candidates, Scorer
from decodery.testing import decode, tiny_transformer

MODEL, PROMPT = tiny_transformer(0), [1, 2, 3]
SAMPLER = Sampler.from_settings(temperature=1.0)


class Low(Scorer):
    """Worth more, the lower the tokens after the prompt."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([-float(sum(output)) / len(output) for output in candidates.outputs])


def run(search: ControlledBlocks, **settings: object) -> list[int]:
    request = Request(PROMPT, **{"max_new_tokens": 12, "sampler": SAMPLER, "seed": 5, **settings})
    (found,) = search.run(Engine(MODEL), request)
    assert found.request.seed == 5
    return found.generated


def test_a_block_as_long_as_the_text_is_best_of_n() -> None:
    texts = [seq.generated for seq in decode(MODEL, [PROMPT], sampler=SAMPLER, seeds=range(5, 9), max_new_tokens=12)]
    assert run(ControlledBlocks(Low(), samples=4, block=12)) == min(texts, key=sum)


def test_every_block_is_the_best_of_those_drawn_after_the_one_before() -> None:
    written: list[int] = []
    for first in range(0, 12, 4):
        drawn = []
        for seed in range(5, 8):
            # Noise belongs to output positions, so the text so far is drawn again and then replaced.
            tokens = list(written)
            while len(tokens) < first + 4:
                segment_end = [*PROMPT, *tokens]
                context = SAMPLER.context(segment_end, 3, SAMPLER.init(PROMPT), seed)
                (seq,) = decode(MODEL, [segment_end], sampler=SAMPLER, max_new_tokens=1)
                logits = _logits(segment_end)
                assert seq.request.prompt_length == len(segment_end)
                tokens.append(int(SAMPLER.pick(SAMPLER.law(logits, [context]), seed, [len(tokens)])[0]))
            drawn.append(tokens)
        written = min(drawn, key=sum)
    assert run(ControlledBlocks(Low(), samples=3, block=4)) == written


def _logits(tokens: list[int]) -> torch.Tensor:
    from decodery.models.batch import Batch, Segment

    return MODEL.forward(Batch([Segment.chunk(tokens, MODEL.new_cache(), logit_rows=[len(tokens) - 1])])).logits


def test_a_head_reads_the_state_of_the_last_token_of_each_block() -> None:
    from decodery.models.batch import Batch, Segment

    head = LinearValue(torch.linspace(-1, 1, 32, dtype=torch.float64), torch.tensor(0.0), tap=2)
    texts = decode(MODEL, [PROMPT], sampler=SAMPLER, seeds=range(5, 9), max_new_tokens=6)
    states = [
        MODEL.forward(Batch([Segment.chunk(seq.tokens, MODEL.new_cache())]), taps=[2]).hidden[2][-1] for seq in texts
    ]
    best = max(range(4), key=lambda number: float(states[number] @ head.weight))
    assert run(ControlledBlocks(ValueHead(head), samples=4, block=6), max_new_tokens=6) == texts[best].generated


def test_greedy_blocks_are_all_the_same() -> None:
    (plain,) = decode(MODEL, [PROMPT], max_new_tokens=12)
    assert run(ControlledBlocks(Low(), block=5), sampler=Sampler.from_settings()) == plain.generated
    with pytest.raises(SettingsError, match="at least 1"):
        ControlledBlocks(Low(), samples=0)
