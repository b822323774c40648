"""`transformers` users keep their call: the tokens are theirs, and every setting means what it did."""

from __future__ import annotations

import copy
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import decodery.integrations.transformers
from decodery.core.errors import SettingsError
from decodery.speculative.drafters import DraftModel
from decodery.testing.statistics import chi_square

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=40, num_key_value_heads=2, max_position_embeddings=256, **SIZES)
    found = LlamaForCausalLM(config).eval()
    for weight in found.parameters():
        weight.data *= 6
    found.generation_config.pad_token_id = 0
    return found


BATCH = torch.tensor([[0, 0, 5, 9, 2, 9, 5], [7, 3, 7, 3, 7, 3, 7], [0, 4, 4, 8, 1, 2, 6]])
MASK = (BATCH != 0).long()


class OddOnly(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # It looks at the history, which for the node of a tree is the node's own.
        odd = (torch.arange(scores.shape[-1]) + input_ids[:, -1:]) % 2 == 0
        return scores.masked_fill(odd, -torch.inf)


class AfterSeven(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] % 7 == 0


class FromTwelve(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        # The padding counts, as it does in transformers.
        return torch.full((len(input_ids),), input_ids.shape[1] >= 12)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token_id": [11, 17, 23, 5]},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
        {"bad_words_ids": [[3], [5, 9]], "min_new_tokens": 4, "eos_token_id": [11, 17, 23, 5]},
        {"logits_processor": LogitsProcessorList([OddOnly()])},
        {"stopping_criteria": StoppingCriteriaList([AfterSeven()])},
        {"stopping_criteria": StoppingCriteriaList([FromTwelve()])},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(12), EosTokenCriteria([11, 17])])},
    ],
    ids=["plain", "ends", "penalties", "bad-words", "own-processor", "own-stop", "own-length", "usual-stops"],
)
@pytest.mark.parametrize("drafter", ["auto", "prompt-lookup", None])
def test_greedy_tokens_are_those_of_transformers(model: Any, settings: dict[str, Any], drafter: Any) -> None:
    asked = {"max_new_tokens": 24, "do_sample": False, "attention_mask": MASK} | settings
    expected = model.generate(BATCH, **asked)
    found = model.generate(BATCH, custom_generate=decodery.integrations.transformers.decode, drafter=drafter, **asked)
    # transformers pads with the longest row that any condition has left.
    assert torch.equal(found, expected[:, : found.shape[1]]) and bool((expected[:, found.shape[1] :] == 0).all())


def test_the_seed_decides_and_the_law_is_the_same(model: Any) -> None:
    asked: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 6, "top_p": 0.9}
    prompt = BATCH[1:2]
    torch.manual_seed(5)
    first, second = (
        decodery.integrations.transformers.generate(model, prompt, max_new_tokens=20, **asked) for _ in range(2)
    )
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(first, decodery.integrations.transformers.generate(model, prompt, max_new_tokens=20, **asked))
    plain, drafted = (
        decodery.integrations.transformers.generate(model, prompt, max_new_tokens=20, seed=3, drafter=each, **asked)
        for each in (None, "auto")
    )
    assert torch.equal(plain, drafted)
    many = decodery.integrations.transformers.generate(
        model, prompt, max_new_tokens=1, num_return_sequences=400, seed=1, **asked
    )
    counts = np.bincount(many[:, -1].numpy(), minlength=40)
    out = model.generate(prompt, max_new_tokens=1, return_dict_in_generate=True, output_scores=True, **asked)
    law, other = out.scores[0][0].softmax(-1).double().numpy(), model(prompt).logits[0, -1].softmax(-1).detach().numpy()
    assert chi_square(counts, law) > 1e-3
    assert chi_square(counts, other.astype(float)) < 1e-3


def test_a_streamer_hears_every_token_and_a_dictionary_comes_where_it_is_asked_for(model: Any) -> None:
    class Heard(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    heard = Heard()
    found = decodery.integrations.transformers.generate(
        model, BATCH[1:2], max_new_tokens=12, do_sample=False, streamer=heard, return_dict_in_generate=True
    )
    assert heard.ended and heard.tokens == found.sequences[0].tolist()


def test_a_model_that_was_cast_decodes_as_it_is_now() -> None:
    torch.manual_seed(0)
    cast = LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=64, **SIZES)).eval()
    decodery.integrations.transformers.generate(cast, BATCH[1:2], max_new_tokens=2, do_sample=False)
    cast.double()
    for weight in cast.parameters():
        weight.data *= 6
    found = decodery.integrations.transformers.generate(cast, BATCH[1:2], max_new_tokens=8, do_sample=False)
    assert torch.equal(found, cast.generate(BATCH[1:2], max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 3}, "search"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"guidance_scale": 2.0}, "source guidance"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [1, 2]}, "constraint"),
        ({"custom_generate": "somebody/else"}, "custom_generate"),
        ({"assistant_tokenizer": object()}, "assistant_tokenizer"),
        ({"negative_prompt_ids": BATCH[:1]}, "negative_prompt_ids"),
        ({"num_assistant_tokens": 4}, "assistant_model"),
        ({"prompt_lookup_num_tokens": 4, "drafter": None}, "prompt_lookup_num_tokens"),
        ({"stop_strings": ["x"]}, "tokenizer="),
        ({"token_healing": True}, "token_healing"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, "penalty_alpha"),
        ({"cache_implementation": "paged"}, "paged"),
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"position_ids": torch.arange(7)[None] + 3}, "position_ids"),
        ({"num_return_sequences": 2, "do_sample": True, "streamer": BaseStreamer()}, "streamer"),
    ],
)
def test_what_cannot_be_done_is_named(model: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        decodery.integrations.transformers.generate(model, BATCH[1:2], max_new_tokens=4, **settings)
    with pytest.raises(SettingsError, match="holds tokens"):
        given = model(BATCH[1:2, :3], use_cache=True).past_key_values
        decodery.integrations.transformers.generate(model, BATCH[1:2], max_new_tokens=4, past_key_values=given)


def test_assistants_of_transformers_draft_and_change_no_token(model: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected, rows = model.generate(BATCH[1:2], **asked), list[int]()
    assistant = copy.deepcopy(model)
    # What a model can do is tried out before its first text.
    decodery.integrations.transformers.generate(model, BATCH[1:2], **asked)
    count = model.model.register_forward_hook(lambda *given: rows.append(given[2].last_hidden_state.shape[1]))
    for settings in (
        {"assistant_model": assistant, "num_assistant_tokens": 5},
        {"drafter": DraftModel(model=assistant, length=5)},
        {"prompt_lookup_num_tokens": 5},
    ):
        rows.clear()
        assert torch.equal(
            decodery.integrations.transformers.generate(model, BATCH[1:2], **asked, **settings), expected
        )
        # The prompt, then steps of one last token and five drafted ones.
        assert 6 in rows[1:] and max(rows[1:]) == 6
        if "prompt_lookup_num_tokens" not in settings:
            assert len(rows) == 5
    count.remove()
    with pytest.raises(SettingsError, match="leave out assistant_model or drafter"):
        decodery.integrations.transformers.generate(
            model, BATCH[1:2], **asked, assistant_model=assistant, drafter="prompt-lookup"
        )


def test_stop_strings_end_texts_where_transformers_ends_them(model: Any) -> None:
    characters = Tokenizer(BPE({each: number for number, each in enumerate(ascii_letters[:40])}, []))
    characters.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
    asked: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "tokenizer": tokenizer}
    third = tokenizer.decode(model.generate(BATCH[1:2], max_new_tokens=3, do_sample=False)[0, -1:])
    expected = model.generate(BATCH[1:2], **asked, stop_strings=[third])
    assert expected.shape[1] <= 10
    assert torch.equal(
        decodery.integrations.transformers.generate(model, BATCH[1:2], **asked, stop_strings=[third]), expected
    )
    config = GenerationConfig(max_new_tokens=24, do_sample=False, stop_strings=[third])
    assert torch.equal(
        decodery.integrations.transformers.generate(model, BATCH[1:2], config, tokenizer=tokenizer), expected
    )
    assert config.stop_strings == [third]


def test_load_names_the_way_for_a_model_that_is_there(model: Any) -> None:
    with pytest.raises(
        SettingsError, match=r"of type LlamaForCausalLM: call decodery\.integrations\.transformers\.generate"
    ):
        decodery.load(model)
    with pytest.raises(SettingsError, match="of type int: give its name"):
        decodery.load(3)  # type: ignore[arg-type]
