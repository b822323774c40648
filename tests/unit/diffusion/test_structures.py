"""Policies that decide what is open, how long a canvas is and in what order blocks come, against slow loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decodery.models.torch.transformer import Transformer
from diffusing import MASK, PROMPT, denoiser, fill, logits_of, order

FIRST, LENGTH, END = len(PROMPT), 16, 7
Written = list[tuple[int, int]]


class Slow:
    """A canvas, looked at as a whole in every pass, and what was written to it in order."""

    def __init__(self, model: Transformer, length: int) -> None:
        self.model, self.length = model, length
        self.tokens, self.written = np.array([*PROMPT, *[MASK] * length]), Written()
        self.passes = 0

    def look(self, tokens: np.ndarray | None = None) -> np.ndarray:
        """[L, vocab] probabilities."""
        self.passes += 1
        rows = logits_of(self.model, self.tokens if tokens is None else tokens)
        shares = np.exp(rows - rows.max(axis=1, keepdims=True))
        found: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
        return found

    def open(self, start: int = 0, end: int | None = None) -> list[int]:
        return [place for place in range(start, end or len(self.tokens)) if self.tokens[place] == MASK]

    def write(self, pairs: Written) -> None:
        for place, token in sorted(pairs):
            self.tokens[place] = token
            self.written.append((place, token))

    @property
    def ended(self) -> bool:
        ends = [place for place in range(FIRST, len(self.tokens)) if self.tokens[place] == END]
        return bool(ends) and not self.open(FIRST, ends[0])


def unsure(law: np.ndarray) -> float:
    return -sum(share * math.log(share) for share in law if share > 0)


def explored(model: Transformer, tau: float, few: int, blocks: int, branches: int, apart: int) -> Written:
    """Explore and exploit: blocks of four, the next one opens when half of the one before it is written."""
    slow, known = Slow(model, LENGTH), None
    blocks_left = [(start, start + 4) for start in range(FIRST, FIRST + LENGTH, 4)]
    while not slow.ended:
        blocks_left = [block for block in blocks_left if slow.open(*block)]
        if not blocks_left:
            break
        if known is None:
            there = blocks_left[:1]
            while len(there) < min(blocks, len(blocks_left)) and len(slow.open(*there[-1])) <= 2:
                there.append(blocks_left[len(there)])
            laws = slow.look()
        else:
            laws, known = known, None
        places = slow.open(there[0][0], there[-1][1])
        sure = [place for place in places if laws[place].max() >= tau]
        slow.write([(place, int(laws[place].argmax())) for place in sure])
        rest = [place for place in places if place not in sure]
        if not rest or len(sure) >= max(few, 1):
            continue
        free = [place for place in rest if laws[place].argmax() != END] if few else []
        free.sort(key=lambda place: -unsure(laws[place]))
        if not free:
            if not sure:
                best = max(places, key=lambda place: laws[place].max())
                slow.write([(best, int(laws[best].argmax()))])
            continue
        if branches > 1:
            place = free[0]
            likely = sorted(range(MASK + 1), key=lambda token: -laws[place][token])[:branches]
            likely = [t for t in likely if t != END and laws[place][t] >= 0.2 * laws[place].max()]
            states = []
            for token in likely:
                state = slow.tokens.copy()
                state[place] = token
                states.append(state)
            seen = [slow.look(state) for state in states]
            region = range(there[0][0], there[-1][1])
            counts = [
                sum(1 for p in region if state[p] == MASK and law[p].max() >= tau)
                for state, law in zip(states, seen, strict=True)
            ]
            scores = [math.log(laws[place][t]) + math.log1p(n) for t, n in zip(likely, counts, strict=True)]
            number = int(np.argmax(scores))
            slow.write([(place, likely[number])])
            known = seen[number] if slow.open(there[0][0], there[-1][1]) else None
            continue
        chosen: list[int] = []
        for start, end in there:
            near = [p for p in free if start <= p < end and all(abs(p - other) >= apart for other in chosen)]
            chosen += near[:1]
        slow.write([(place, int(laws[place].argmax())) for place in chosen])
    return slow.written


@pytest.mark.parametrize("branches", [1, 3])
def test_explore_and_exploit_is_its_rules_step_by_step(branches: int) -> None:
    differs = 0
    for seed in range(3):
        model = denoiser(seed)
        for tau, few, blocks, apart in ((0.3, 2, 2, 4), (0.25, 4, 3, 2), (0.9, 1, 4, 1)):
            spec = f"explore-exploit:block=4,tau={tau},few={few},blocks={blocks},branches={branches},distance={apart}"
            found = order(fill(model, spec, LENGTH, eos=[END]))
            assert found == explored(model, tau, few, blocks, branches, apart), spec
            differs += found != order(fill(model, f"threshold:block=4,tau={tau}", LENGTH, eos=[END]))
    assert differs > 4, "these were to explore"


def structured(model: Transformer, tau: float, mean: int, least: int, most: int, weld: int, doubt: float) -> Written:
    """Dystruct as its docstring says it, with alpha 1, spread .1, wide .3, centre .5, gamma 1, reach 4, penalty 1."""
    slow, whole, budget = Slow(model, 0), FIRST + LENGTH, LENGTH
    spread, wide, before = 0.1, 0.3, None

    def normal(value: float, centre: float, width: float) -> float:
        return math.exp(-0.5 * ((value - centre) / width) ** 2) / width

    def resize(length: int) -> None:
        more = max(length - len(slow.tokens), 0)
        slow.tokens = np.append(slow.tokens[:length], np.full(more, MASK))

    def instability(laws: np.ndarray, place: int) -> float:
        return unsure(laws[place]) / math.log(MASK + 1)

    start = FIRST
    while start < whole and slow.passes < budget and not slow.ended:
        resize(min(start + most, whole))
        laws = slow.look()
        seen = len(slow.tokens)
        shaky = [instability(laws, place) for place in range(start, seen)]
        # ln of mean**n / n! times exp(-what is unsure), without what all lengths share.
        scores = {
            n: n * math.log(mean) - math.lgamma(n + 1) - sum(shaky[:n])
            for n in range(min(least, len(shaky)), len(shaky) + 1)
        }
        length = len(shaky) if mean == most else max(scores, key=lambda n: (scores[n], -n))
        ends = [n for n in range(len(shaky)) if laws[start + n][END] >= 0.5]
        length = min([length, *(n + 1 for n in ends[:1])])
        blocks, own = [], [shaky[0]]
        for n in range(1, length):
            stay = len(own) * normal(shaky[n], sum(own) / len(own), spread)
            if stay >= normal(shaky[n], 0.5, wide):
                own.append(shaky[n])
            else:
                blocks.append((start + n - len(own), start + n))
                own = [shaky[n]]
        blocks.append((start + length - len(own), start + length))
        known = laws if start + length == seen or slow.passes >= budget else None
        resize(start + length)
        while slow.open(start) and not slow.ended:
            laws, known = (slow.look() if known is None else known), None
            if slow.passes >= budget:
                slow.write([(place, int(laws[place].argmax())) for place in slow.open(start)])
                break
            best: tuple[float, list[int]] | None = None
            for low, high in blocks:
                inside = slow.open(low, high)
                if not inside:
                    continue
                near = [*range(max(low - 4, 0), low), *range(high, min(high + 4, len(slow.tokens)))]
                written = sum(slow.tokens[place] != MASK for place in near) / len(near) if near else 0.0
                energy = sum(instability(laws, place) for place in inside) / len(inside) - written
                if best is None or energy < best[0] - 1e-12:
                    best = energy, inside
            assert best is not None
            surest = max(best[1], key=lambda place: laws[place].max())
            slow.write([(p, int(laws[p].argmax())) for p in best[1] if laws[p].max() >= tau or p == surest])
        borders = [border for border in (before, *(high for _, high in blocks[:-1])) if border is not None]
        for border in borders if weld else ():
            if slow.passes + 2 <= budget and not slow.ended:
                welded(slow, range(max(border - weld, FIRST), min(border + weld, len(slow.tokens))), doubt)
        start = before = len(slow.tokens)
    return slow.written


def welded(slow: Slow, strip: range, doubt: float) -> None:
    """Open a border again, decide its doubtful places in two halves, and keep what is likelier in all."""
    old = {place: int(slow.tokens[place]) for place in strip}
    state = slow.tokens.copy()
    state[list(strip)] = MASK
    laws = slow.look(state)
    best = {place: int(laws[place].argmax()) for place in strip}
    weak = [place for place in strip if laws[place][old[place]] < doubt]
    if all(best[place] == old[place] for place in weak):
        return
    weak.sort(key=lambda place: (-laws[place].max(), place))
    half = -(-len(weak) // 2)
    first, rest = sorted(weak[:half]), sorted(weak[half:])
    gain = sum(math.log(laws[p][best[p]]) - math.log(laws[p][old[p]]) for p in first)
    new = {**old, **{place: best[place] for place in first}}
    if rest:
        pair = []
        for tokens in (new, old):
            state = slow.tokens.copy()
            state[list(strip)] = [tokens[place] for place in strip]
            state[rest] = MASK
            pair.append(slow.look(state))
        # Both states are looked at in one pass.
        slow.passes -= 1
        new |= {place: int(pair[0][place].argmax()) for place in rest}
        gain += sum(math.log(pair[0][p][new[p]]) - math.log(pair[1][p][old[p]]) for p in rest)
    if gain > 0:
        slow.write([(place, new[place]) for place in strip if new[place] != old[place]])


@pytest.mark.parametrize("weld", [0, 2])
def test_dystruct_is_its_rules_step_by_step(weld: int) -> None:
    found_welds = 0
    for seed in range(3):
        model = denoiser(seed)
        for tau, mean, least, most, doubt in ((0.3, 4, 2, 8, 0.5), (0.4, 8, 8, 8, 1.0), (0.25, 3, 1, 6, 0.9)):
            spec = f"dystruct:tau={tau},mean={mean},least={least},most={most},weld={weld},doubt={doubt}"
            canvas = fill(model, spec, LENGTH, eos=[END])
            assert order(canvas) == structured(model, tau, mean, least, most, weld, doubt), (spec, seed)
            found_welds += len(order(canvas)) - len({place for place, _ in order(canvas)})
    assert (found_welds > 0) == (weld > 0)
