"""How often every short run of tokens occurs in past texts, which can be forgotten again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from decodery.step.drafter_memory import Guarded


class _Node:
    """A path-compressed edge and what is below it. text[start : start + length]: its tokens; count: suffixes here."""

    __slots__ = ("children", "count", "length", "start", "text")

    def __init__(self, text: Sequence[int], start: int, length: int, count: int) -> None:
        self.text, self.start, self.length, self.count = text, start, length, count
        self.children: dict[int, _Node] = {}


Cursor = tuple[_Node, int]
"""A place in the trie: a node, and how many tokens of its edge are walked."""


class SuffixTrie(Guarded):
    """A suffix tree of bounded depth over texts, with counts of runs of up to `depth` tokens.

    Texts leave in the order they came once they hold more than `tokens` tokens together. Memory: at most two nodes of a
    few hundred bytes per token. Safe to share between threads while `lock` is held.
    """

    def __init__(self, depth: int, tokens: int) -> None:
        self.depth = depth
        self.tokens = tokens
        super().__init__()
        self._root = _Node((), 0, 0, 0)
        self._texts: deque[tuple[int, ...]] = deque()
        self._held = 0

    def __len__(self) -> int:
        """How many texts are held."""
        return len(self._texts)

    def add(self, text: Sequence[int]) -> None:
        """Remember a text; the oldest ones leave where it is one too many."""
        kept = tuple(text)[: self.tokens]
        with self.lock:
            for start in range(len(kept)):
                self._insert(kept, start)
            self._texts.append(kept)
            self._held += len(kept)
            while self._held > self.tokens:
                self.forget_oldest()

    def forget_oldest(self) -> None:
        """Remove the text that was added first."""
        with self.lock:
            oldest = self._texts.popleft()
            self._held -= len(oldest)
            for start in range(len(oldest)):
                self._remove(oldest, start)

    def root(self) -> Cursor:
        return self._root, 0

    def count(self, cursor: Cursor) -> int:
        """How often the run up to a place occurs."""
        return cursor[0].count

    def find(self, run: Sequence[int]) -> Cursor | None:
        """The place of `run`, None where it does not occur or is longer than `depth`."""
        node, at = self._root, 0
        while at < len(run):
            child = node.children.get(run[at])
            if child is None:
                return None
            size = min(child.length, len(run) - at)
            if tuple(child.text[child.start : child.start + size]) != tuple(run[at : at + size]):
                return None
            node, at = child, at + size
        return node, size if run else 0

    def following(self, cursor: Cursor) -> list[tuple[int, Cursor]]:
        """The tokens that occur after a place, and the places they lead to."""
        node, walked = cursor
        if walked < node.length:
            return [(node.text[node.start + walked], (node, walked + 1))]
        return [(token, (child, 1)) for token, child in node.children.items()]

    def _insert(self, text: tuple[int, ...], start: int) -> None:
        end = min(start + self.depth, len(text))
        node = self._root
        node.count += 1
        at = start
        while at < end:
            child = node.children.get(text[at])
            if child is None:
                node.children[text[at]] = _Node(text, at, end - at, 1)
                return
            size = 1
            most = min(child.length, end - at)
            while size < most and child.text[child.start + size] == text[at + size]:
                size += 1
            if size < child.length:
                child = self._split(node, child, size)
            child.count += 1
            node, at = child, at + size

    def _split(self, parent: _Node, child: _Node, size: int) -> _Node:
        """Cut an edge in two; returns the upper part."""
        upper = _Node(child.text, child.start, size, child.count)
        parent.children[child.text[child.start]] = upper
        child.start, child.length = child.start + size, child.length - size
        upper.children[child.text[child.start]] = child
        return upper

    def _remove(self, text: tuple[int, ...], start: int) -> None:
        end = min(start + self.depth, len(text))
        node = self._root
        node.count -= 1
        at = start
        while at < end:
            child = node.children[text[at]]
            child.count -= 1
            if child.count == 0:
                del node.children[text[at]]
                return
            if child.text is text:
                # Its tokens move out, so that no edge keeps a forgotten text in memory.
                child.text, child.start = text[child.start : child.start + child.length], 0
            node, at = child, at + child.length
