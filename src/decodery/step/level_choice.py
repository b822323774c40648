"""What texts read next of the drafts below them, chosen on their device for all of them."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Ordered

import numpy as np
import torch

from decodery.core import noise
from decodery.models.torch.one_pass import to_device
from decodery.sampling.batched import batched_sampling, rows_together

from .look_ahead import UNSAID, Look, Rows, logged


def perturbed(above: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
    """Gumbel-perturbed log-probabilities of children; each row's maximum equals its parent's.

    Source: Stochastic Beams and Where to Find Them (2019), appendix B.

    Args:
        above: [..., m] float64, the parents'.
        reached: [..., m, k], the children's own perturbed values, unconditioned, falling along rows.

    Returns:
        [..., m, k], row maxima equal to `above`.
    """
    over = above[..., None]
    v = over - reached + (-(reached - reached[..., :1]).exp()).log1p()
    return (over - v.clamp(min=0.0) - (-v.abs()).exp().log1p()).masked_fill(~reached.isfinite(), -torch.inf)


def choose_next(looks: Ordered[tuple[Look, torch.Tensor]]) -> None:
    """Let texts go on by the logits [n, outputs] of the rows that were read last.

    The host waits once for all that have looked far enough.

    Args:
        looks: Of each text, with its rows.
    """
    groups: dict[Hashable, list[tuple[Look, torch.Tensor]]] = {}
    for each, rows in looks:
        groups.setdefault(each.alike(rows), []).append((each, rows))
    done: list[tuple[Look, torch.Tensor, Rows | None]] = []
    for group in groups.values():
        done += _Group([each for each, _ in group], torch.cat([rows for _, rows in group]).float()).gone_on()
    ended = [(each, [*each.levels, level]) for each, level, _ in done if len(each.levels) + 1 == len(each.plan)]
    if ended:
        # Float64 holds ids, too.
        host = torch.cat([level for _, levels in ended for level in levels]).cpu().numpy()
        for each, levels in ended:
            sizes = [len(level) for level in levels]
            own, host = host[: sum(sizes)], host[sum(sizes) :]
            each.found = _found(each, np.split(own, np.cumsum(sizes)[:-1]))
    # Nothing has changed where something of it failed.
    for each, level, following in done:
        each.levels.append(level)
        each.rows = following


def _found(look: Look, levels: list[np.ndarray]) -> list[list[np.ndarray]]:
    """`Look.found` of the numbers of all levels."""
    found, rows = [], 1
    for numbers, planned in zip(levels, look.plan, strict=True):
        kinds = 3 if look.origin == "without-replacement" else 2
        *known, chosen = np.split(numbers, np.arange(1, kinds + 1) * rows * planned.children)
        tokens, values, *scores = (each.reshape(rows, planned.children) for each in known)
        ids = tokens.astype(np.int64)
        ids, values = logged((ids, values)) if look.processors is None else (ids, values)
        found.append([ids, values, *scores, chosen.astype(np.int64)])
        rows = len(chosen)
    return found


class _Group:
    """Texts that go on in the same way.

    Args:
        looks: Of each.
        logits: [texts * n, outputs] float32 of their rows, which may be written to.
    """

    def __init__(self, looks: list[Look], logits: torch.Tensor) -> None:
        self._looks, self._logits = looks, logits
        self._first, self._planned = looks[0], looks[0].level
        self._texts, self._each = len(looks), len(logits) // len(looks)
        self._ending = len(self._first.levels) + 1 == len(self._first.plan)

    def gone_on(self) -> list[tuple[Look, torch.Tensor, Rows | None]]:
        """Of each text its level, and what it reads next."""
        given, padding = self._given(), self._first.padding
        if padding is not None:
            padding.exclude(self._logits)
        tokens, *known = self._as_they_are() if self._first.processors is None else self._shaped(*given[2:])
        shape = self._texts, self._each * self._planned.children
        tokens, *known = (each.reshape(shape) for each in (tokens, *known))
        parts = [tokens.double(), *(each.double() for each in known)]
        if self._ending:
            return [(each, level, None) for each, level in zip(self._looks, torch.cat(parts, dim=1), strict=True)]
        chosen, rows = self._chosen(tokens, known, *given[:2])
        levels = torch.cat((*parts, chosen.double()), dim=1)
        return [(each, levels[n], Rows(*(part[n] for part in rows))) for n, each in enumerate(self._looks)]

    def _given(self) -> list[torch.Tensor]:
        """What comes from the host, by one copy.

        End tokens [texts, ends] and which children are read; and where rows are shaped, keys of their noise [rows],
        settings of processors [kinds, rows], and where draws are independent, hashes of seeds and of roots.
        """
        read, looks = self._planned.read, self._looks
        parts = [np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)]
        if not self._ending:
            parts[0] = np.array([sorted(each.seq.request.eos_ids) for each in looks], dtype=np.int64)
            parts[1] = np.array(read if isinstance(read, tuple) else (), dtype=np.int64)
        if self._first.processors is not None:
            owners = np.repeat(np.arange(self._texts), self._each)
            seeds = np.array([each.seed for each in looks], dtype=np.uint64)
            positions = np.array([each.seq.position for each in looks]) + len(self._first.levels)
            self._sampling = batched_sampling(tuple(each.processors for each in looks if each.processors is not None))
            parts += [noise.keys(seeds, positions)[owners], self._sampling.settings(owners).view(np.int64)]
            if self._first.origin == "sampled":
                streams = [noise.signed(noise.mix(each.seed, noise.DRAFT)) for each in looks]
                roots = [noise.signed(noise.mix(each.seq.position)) for each in looks]
                parts += [np.array(streams)[owners], np.array(roots)]
        if not sum(part.size for part in parts):
            return [self._logits.new_empty(part.shape, dtype=torch.int64) for part in parts]
        there = to_device(np.concatenate([part.reshape(-1) for part in parts]), self._logits.device)
        split = there.split([part.size for part in parts])
        return [own.view(part.shape) for own, part in zip(split, parts, strict=True)]

    def _as_they_are(self) -> list[torch.Tensor]:
        """The most likely tokens of rows and their probabilities [rows, children]."""
        words = self._first.words
        most, best = self._logits.topk(self._planned.children, dim=-1)
        chances = (most - self._logits.logsumexp(dim=-1, keepdim=True)).exp()
        return [best if words is None else words[best], chances]

    def _shaped(self, keys: torch.Tensor, settings: torch.Tensor, *hashes: torch.Tensor) -> list[torch.Tensor]:
        """Children of rows, their log-probabilities [rows, children], and these with noise where that orders them."""
        choice, k = self._sampling.alone, self._planned.children
        assert choice is not None
        of_draws = self._keys_of_draws(keys, *hashes) if hashes else [keys]
        found = []
        count = rows_together(self._logits.shape[1])
        for first in range(0, len(keys), count):
            some = slice(first, first + count)
            law = choice.law(self._logits[some].clamp(min=UNSAID), settings.view(torch.float64)[:, some]).log_softmax(
                dim=-1
            )
            if self._first.origin == "deterministic":
                values, ids = law.topk(k, dim=-1)
                found.append([ids, values])
            elif self._first.origin == "without-replacement":
                scores, ids = noise.keyed(law, keys[some]).topk(k, dim=-1)
                found.append([ids, law.gather(1, ids), scores])
            else:
                ids = torch.stack([noise.keyed_argmax(law, own[some]) for own in of_draws], dim=1)
                found.append([ids, law.gather(1, ids)])
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _keys_of_draws(self, keys: torch.Tensor, streams: torch.Tensor, roots: torch.Tensor) -> list[torch.Tensor]:
        """Of each draw, what its noise at all rows is hashed from: the first one has the text's own."""
        below = [each.rows.places for each in self._looks if each.rows is not None]
        self._places = torch.cat(below) if below else roots
        at = noise.mixed(0, self._places)
        return [keys, *(noise.mixed(streams, noise.mixed(at, -n)) for n in range(1, self._planned.children))]

    def _chosen(
        self, tokens: torch.Tensor, known: list[torch.Tensor], ends: torch.Tensor, read: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Which children [texts, m] are read next, and those as `Rows`, of all texts each.

        Args:
            tokens: [texts, n * children].
            known: The same, what is known of them.
            ends: [texts, ends].
            read: Which are read, of none where the most likely are.
        """
        above = [each.rows for each in self._looks if each.rows is not None]
        shape, k, texts = (self._texts, self._each, -1), self._planned.children, self._texts
        reached = known[0].double() if self._first.processors is not None else known[0].double().log()
        zero = reached.new_zeros(texts, self._each)
        scores, values = (
            (torch.stack([each.scores for each in above]), torch.stack([each.values for each in above]))
            if above
            else (zero, zero)
        )
        drawn = self._first.origin == "without-replacement"
        with_noise = perturbed(values, scores[..., None] + known[1].view(shape)).flatten(1) if drawn else None
        reached = (scores[..., None] + reached.view(shape)).flatten(1)
        if isinstance(self._planned.read, int):
            ended = (tokens[..., None] == ends[:, None]).any(dim=-1)
            order = (reached if with_noise is None else with_noise).masked_fill(ended, -torch.inf)
            # Of equals the first ones, and all of them in order, as policies choose on the host.
            order = order.sort(dim=-1, descending=True, stable=True).indices[:, : self._planned.read]
            chosen = order.sort(dim=-1).values
        else:
            chosen = read.expand(texts, -1)
        rows, size = chosen // k, chosen.shape[1]
        seen = torch.eye(size, dtype=torch.bool, device=tokens.device).expand(texts, size, size)
        if above:
            before = torch.stack([each.seen for each in above])
            seen = torch.cat((before.gather(1, rows[..., None].expand(texts, size, before.shape[2])), seen), dim=2)
        tokens = tokens.gather(1, chosen)
        places = torch.zeros_like(tokens)
        if self._first.origin == "sampled":
            places = noise.mixed(noise.mixed(0, self._places.view(texts, -1).gather(1, rows)), tokens)
        reached = reached.gather(1, chosen)
        values = reached if with_noise is None else with_noise.gather(1, chosen)
        return chosen, [tokens, rows, seen, reached, values, places]
