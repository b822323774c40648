"""All substrings of a growing text, in two states per token."""

from __future__ import annotations


class SuffixAutomaton:
    """An online suffix automaton with the first end and the count of every substring.

    Memory: at most two states per token.

    Args:
        next, link, length, end: Per state, the transitions, the suffix link, the longest string's length and where its
            strings ended first.
        count: Occurrences of a state's strings, kept for strings of up to `depth` tokens; 0: of none.
        match, matched: The state of the longest suffix that stands earlier in the text too, and that suffix's length.
        recent: The state of the text's last `depth` tokens (all of it, if shorter).
    """

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [-1]
        self.count = [0]
        self.match = self.matched = 0
        self.recent = self._reach = 0
        self.tokens: list[int] = []
        self._last = 0

    def extend(self, text: list[int]) -> None:
        """Take in what `text` holds beyond the tokens so far."""
        for token in text[len(self.tokens) :]:
            # The match first: in the other order the text would match itself.
            self._move(token)
            self._append(token)
            self.tokens.append(token)
            while self.match and self.matched <= self.length[self.link[self.match]]:
                self.match = self.link[self.match]
            if self.depth:
                self._count(token)

    def follows(self) -> int | None:
        """Where the first copy of the longest matching suffix goes on, None where nothing matches."""
        return self.end[self.match] + 1 if self.matched else None

    def _move(self, token: int) -> None:
        state = self.match
        while state and token not in self.next[state]:
            state = self.link[state]
            self.matched = self.length[state]
        if token in self.next[state]:
            self.match, self.matched = self.next[state][token], self.matched + 1
        else:
            self.match = self.matched = 0

    def _append(self, token: int) -> None:
        new = self._state({}, self.length[self._last] + 1, len(self.tokens), 0)
        state = self._last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state < 0:
            self.link[new] = 0
        else:
            self.link[new] = self._exactly(state, token)
        self._last = new

    def _exactly(self, state: int, token: int) -> int:
        """The state after `state` and `token` whose longest string is that of `state` and one more."""
        target = self.next[state][token]
        if self.length[target] == self.length[state] + 1:
            return target
        clone = self._state(self.next[target].copy(), self.length[state] + 1, self.end[target], self.count[target])
        self.link[clone] = self.link[target]
        self.link[target] = clone
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def _state(self, transitions: dict[int, int], length: int, end: int, count: int) -> int:
        self.next.append(transitions)
        self.link.append(-1)
        self.length.append(length)
        self.end.append(end)
        self.count.append(count)
        return len(self.length) - 1

    def _count(self, token: int) -> None:
        self.recent = self.next[self.recent][token]
        self._reach = min(self._reach + 1, self.depth)
        while self.length[self.link[self.recent]] >= self._reach:
            self.recent = self.link[self.recent]
        state = self.recent
        while state > 0:
            self.count[state] += 1
            state = self.link[state]
        self.count[0] += 1
