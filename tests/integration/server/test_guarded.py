"""A server whose monitor was calibrated on labelled texts decides over HTTP as calibration did, whoever asks."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np

from decodery.constraints.regex import Regex
from decodery.llm.llm import LLM
from decodery.monitors.confidence import Confidence
from decodery.training.labelled import LabelledChat, highest_scores
from decodery.training.monitor_threshold import calibrate
from serving import serving, tiny_lm

PATTERN, TOKENS, RATE = "[a-z]{6}", 10, 0.2
KINDS = {False: 0.3, True: 2.0}
"""Temperatures of harmless texts, and of those that are looked for."""
TRIED: tuple[dict[str, Any], ...] = ({"monitor": []}, {"monitor": "confidence"}, {"drafter": "none"})


def labelled(lm: LLM, count: int) -> list[LabelledChat]:
    found = []
    for seed in range(count):
        asked, wanted = [{"role": "user", "content": f"Say {seed}"}], bool(seed % 2)
        settings = {"temperature": KINDS[wanted], "seed": seed, "max_new_tokens": TOKENS}
        text = lm.chat(asked, constraint=Regex(PATTERN), **settings).text  # type: ignore[arg-type]
        found.append(LabelledChat((*asked, {"role": "assistant", "content": text}), wanted, str(seed)))
    return found


def test_a_guard_stops_what_its_calibration_flags_and_no_request_gets_around_it() -> None:
    lm, texts = tiny_lm(), labelled(tiny_lm(), 60)
    threshold, _ = calibrate(lm, texts, Confidence("worst"), RATE)
    guard = Confidence("worst", threshold=threshold.value, action="stop")
    scores = highest_scores(lm, texts, Confidence("worst"))
    with serving(lm, guards=[guard]) as (_, url), httpx.Client(timeout=60) as client:

        def stopped(seed: int, **own: Any) -> bool:
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"Say {seed}"}], "seed": seed}
            body |= {"temperature": KINDS[bool(seed % 2)], "max_tokens": TOKENS, "decodery": own}
            body["guided_regex"] = PATTERN
            answer = client.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return bool(answer.json()["choices"][0]["finish_reason"] == "content_filter")

        # The very decision of calibration, text by text. One text's score is the threshold: there the last bit decides,
        # which depends on how many rows a pass has.
        clear = [seed for seed, score in enumerate(scores) if abs(score - threshold.value) > 1e-5]
        assert len(clear) >= 59
        assert [stopped(seed) for seed in clear] == [scores[seed] > threshold.value for seed in clear]
        flagged = [seed for seed, score in enumerate(scores) if score > threshold.value][:6]
        assert flagged and all(stopped(seed, **own) for seed in flagged for own in TRIED)
        # Harmless texts that calibrated nothing: both halves of the error are chance.
        alarms = np.mean([stopped(seed) for seed in range(1000, 1080, 2)])
        assert alarms < RATE + 3 * np.sqrt(RATE * (1 - RATE) * (1 / 40 + 1 / threshold.harmless))
