"""What is asked of the real model, and how it is sampled."""

from __future__ import annotations

from decodery.llm.llm import LLM
from decodery.sampling import Sampler

QUESTIONS = [
    "What causes the tides?",
    "List the numbers from one to twenty, then list them again.",
    "Correct the spelling and repeat the text: The quik brown fox jumps ovr the lazy dog. The dog sleps.",
    "Write a Python function that adds two numbers, then one that subtracts them.",
    "Repeat this sentence three times: Rivers carry water from the mountains to the sea.",
    "Translate to French: The cat sits on the table.",
    "Summarise: Bees collect nectar from flowers and turn it into honey. They live in hives led by a queen. Bees "
    "pollinate the plants that people eat, and without bees many plants would not bear fruit.",
    "Tell me a short story about a lighthouse keeper.",
]
SAMPLED = Sampler.from_settings(temperature=0.8, top_p=0.95, repetition_penalty=1.05)


def prompts(lm: LLM, count: int = len(QUESTIONS)) -> list[list[int]]:
    return [lm.encode(question) for question in QUESTIONS[:count]]
