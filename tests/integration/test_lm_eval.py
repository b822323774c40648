"""lm-evaluation-harness runs over this package's models: scores are the model's own, texts the same with drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decodery.core.errors import SettingsError

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm_eval")

QUESTION = "What is the capital of France?\nAnswer:"


@pytest.fixture(scope="module")
def models() -> list[Any]:
    from decodery.integrations.lm_eval import Harness

    return [Harness(drafter=drafter) for drafter in ("auto", "none")]


def asked(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_scores_are_those_of_one_pass_over_all_of_it(models: list[Any]) -> None:
    from decodery.models.batch import Batch, Segment

    model = models[0].lm.model
    context, answer = (models[0].tok_encode(text) for text in (QUESTION, " Paris, in the north"))
    tokens = [*context, *answer]
    law = model.forward(Batch([Segment.chunk(tokens[:-1], model.new_cache())])).logits.float().log_softmax(-1)
    expected = float(law[len(context) - 1 :].gather(1, torch.tensor(answer)[:, None]).sum())
    ((found, greedy),) = models[0].loglikelihood([asked(QUESTION, " Paris, in the north")])
    assert found == pytest.approx(expected, abs=1e-3) and not greedy
    likely, other = (models[0].loglikelihood([asked(QUESTION, each)])[0][0] for each in (" Paris", " Lisbon"))
    assert likely > other + 2
    (whole,) = models[0].loglikelihood_rolling([asked(QUESTION + " Paris")])
    assert whole < likely < 0


def test_texts_end_where_the_task_says_with_and_without_drafts(models: list[Any]) -> None:
    told = {"until": ["\n"], "do_sample": False, "max_gen_toks": 12}
    requests = [asked(f"Q: What is the capital of {land}?\nA:", told) for land in ("France", "Italy", "Japan")]
    drafted, plain = (each.generate_until(requests) for each in models)
    assert drafted == plain and not any("\n" in text for text in plain) and "Paris" in plain[0]
    longer = [asked(request.args[0], told | {"until": []}) for request in requests]
    assert any("\n" in text for text in models[1].generate_until(longer))
    with pytest.raises(SettingsError, match="num_beams: no setting"):
        models[0].generate_until([asked("Q:", {"num_beams": 3})])
