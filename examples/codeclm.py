"""Prompts of one's own domain to train a draft on: made from a few, made harder, and kept where the draft is weak.

The way is CodecLM's (2024): a model encodes each prompt as a use case and skills, decodes that into a new prompt, and
makes it harder by rubrics of its own until there is something to learn. For a draft that is how many passes a token
still takes; `judged` is the gap of the paper, for a model that is to answer better.

Run it with `python examples/codeclm.py [PROMPTS.txt [OUT.txt]]`: a prompt a line in, a prompt a line out, for
`decodery train draft --prompts OUT.txt`. A small model writes small prompts: name a larger one as MODEL for real use.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import decodery as dc

MODEL = "smollm2"
SEEDS = ("Write a polite reply to a customer whose parcel is late.",)

Model = Callable[[str], str]
"""Answers a prompt."""
Gap = Callable[[str], float]
"""How much there is to learn from a prompt."""


@dataclass(frozen=True)
class Codec:
    """theta: what is kept has a larger gap. rounds: how often a prompt is made harder at most. The paper's are 3, on a
    judge's scale of 10, and 4.
    """

    model: Model
    gap: Gap
    theta: float = 3.0
    rounds: int = 4

    def prompts(self, seeds: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Of each seed the new prompt that is kept, if any, with its gap."""
        for seed in seeds:
            about = self.model(
                f"In one line: what is this instruction used for, and which skills does it take?\n\n{seed}"
            )
            prompt = line(self.model(f"Write one new instruction for this use case and these skills.\n\n{about}"))
            for number in range(self.rounds + 1):
                if (found := self.gap(prompt)) > self.theta:
                    yield prompt, found
                    break
                if number < self.rounds:
                    prompt = self.harder(prompt, about)

    def harder(self, prompt: str, about: str) -> str:
        """The prompt after one action of the model's own rubrics."""
        action = line(self.model(f"Name one action that makes an instruction of this kind harder.\n\n{about}"))
        return line(self.model(f"Rewrite the instruction by this action.\n\nAction: {action}\n\nInstruction: {prompt}"))


def judged(strong: Model, weak: Model, judge: Callable[[str, str, str], tuple[float, float]]) -> Gap:
    """How much better `strong` answers than `weak`, for a judge of two answers that sees them in both orders: what it
    gives to a place cancels out.
    """

    def gap(prompt: str) -> float:
        ours, theirs = strong(prompt), weak(prompt)
        first, second = judge(prompt, ours, theirs), judge(prompt, theirs, ours)
        return (first[0] + second[1] - first[1] - second[0]) / 2

    return gap


def unguessed(lm: dc.LLM, drafter: str, tokens: int) -> Gap:
    """Passes per token under a drafter: 1 where it guesses nothing, the less the more it guesses."""

    def gap(prompt: str) -> float:
        trace = lm.generate(prompt, drafter=drafter, max_new_tokens=tokens).trace
        print(f"{trace.tokens_per_pass:.2f} tokens per pass: {prompt[:90]}")
        return 1 / trace.tokens_per_pass

    return gap


def line(text: str) -> str:
    """The first line of a text that says something."""
    return next((each.strip(' *"') for each in text.splitlines() if each.strip(' *"#')), text)


def main(seeds: Sequence[str], out: Path | None) -> None:
    lm = dc.load(MODEL)

    def model(prompt: str) -> str:
        return lm.generate(prompt, temperature=0.7, max_new_tokens=24).text

    codec = Codec(model, unguessed(lm, "draft-model", 24), theta=0.3, rounds=1)
    found = list(codec.prompts(seeds))
    print(f"{len(found)} of {len(seeds)} prompts are kept")
    if out is not None:
        out.write_text("".join(f"{prompt}\n" for prompt, _ in found), encoding="utf-8")


if __name__ == "__main__":
    given = [Path(each) for each in sys.argv[1:] if each.endswith(".txt")]
    main(given[0].read_text("utf-8").splitlines() if given else SEEDS, given[1] if len(given) > 1 else None)
