"""Prompts that hold images: what the engine makes of them, and the drafter that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from decodery import LLM
from decodery.core.errors import PromptError, SettingsError
from decodery.engine.engine import Engine
from decodery.engine.output import Output
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.models.batch import Batch
from decodery.models.loaders.load import LoadedModel, load
from decodery.models.loaders.store import silent
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.transformers.adapter import TransformersModel
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.eagle import EAGLEHead
from decodery.speculative.drafters.msd import MSD, MSDHead
from decodery.speculative.heads.head import EMBEDDED, TrainedHead
from decodery.speculative.heads.reading import HeadReading
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.embedded import Embeddings, chunk
from decodery.step.sequence import Sequence
from decodery.training.data import write_texts
from decodery.training.embedded import read_prompts, save_prompts, write_shown
from decodery.training.features import FeatureRows, FeatureStore
from decodery.training.head import TOP, HeadRecipe, _HeadTraining, _StoredTexts, train_head
from decodery.training.kind import Run
from tiny_models import SHAPE, SPECIAL, randomize, save

IMAGE = 258
PROMPT = [5, 6, IMAGE, 7, 8, IMAGE, 9, 10, 6, 7]


@cache
def vision() -> transformers.LlavaForConditionalGeneration:
    """A tiny LLaVA: pictures of 4 by 4 pixels are four patches."""
    text = transformers.LlamaConfig(**SHAPE)
    sight = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=4, patch_size=2
    )
    config = transformers.LlavaConfig(vision_config=sight, text_config=text, image_token_id=IMAGE)
    return randomize(transformers.LlavaForConditionalGeneration(config), seed=3)


@cache
def pictures() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(5))


@cache
def seen() -> tuple[torch.Tensor, ...]:
    """What the tower makes of both pictures, as the language model reads it."""
    with torch.no_grad():
        found = vision().model.get_image_features(pictures())
    return tuple(each for each in getattr(found, "pooler_output", found))


@cache
def hf_language() -> transformers.LlamaForCausalLM:
    """The language model of it on its own."""
    whole = vision()
    alone = transformers.LlamaForCausalLM(whole.config.text_config)
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    return alone.eval()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("msd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODERY_HOME", str(folder / "home"))
        return load(save(vision(), folder / "model"), dtype="float32", device="cpu")


def trained(model: Transformer, kind: type[EAGLEHead] = MSDHead) -> TrainedHead:
    tensors, about = kind.untrained(model, 0)
    return TrainedHead(kind.kind, tensors, about)


@dataclass(frozen=True)
class Told(Drafter):
    """Drafts what it was told, and then what is wrong."""

    tokens: tuple[int, ...]

    def start(self, seq: Sequence) -> None:
        return None

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        ahead = self.tokens[seq.position : seq.position + min(2, budget.depth)]
        return DraftTree.chain(seq.last_token, [*ahead, 3][: budget.depth])

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        return None


def written(
    model: LanguageModel, tokens: list[int], held: Embeddings | None, size: int = 64, **settings: Any
) -> Sequence:
    """A text beside another one, which gives its memory back on the way."""
    engine = Engine(model, prefill_chunk=size)
    seq = engine.submit(Request(tokens, max_new_tokens=10, prompt_embeds=held, **settings))
    other = engine.submit(Request([1, 2, 3], max_new_tokens=3))
    for _ in range(3):
        engine.step()
    engine.preempt(seq)
    engine.run([seq, other])
    return seq


def test_the_engine_writes_what_generate_writes_whatever_drafts(loaded: LoadedModel) -> None:
    tokens, held = Embeddings.placed(PROMPT, IMAGE, seen())
    with torch.no_grad():
        expected = vision().generate(
            input_ids=torch.tensor([tokens]), pixel_values=pictures(), max_new_tokens=10, do_sample=False,
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64), eos_token_id=None,
        )[0, len(tokens) :].tolist()  # fmt: skip
    model = loaded.model
    assert isinstance(model, Transformer)
    msd = MSD(trained(model), tree_policy="eagle-2(nodes=6,width=2,depth=3)")
    for drafter in (None, Told(tuple(expected)), msd):
        for size in (3, 64):
            seq = written(model, tokens, held, size, drafter=drafter)
            assert seq.generated == expected, (drafter, size)
            assert (sum(step.accepted for step in seq.trace.steps) >= 6) == isinstance(drafter, Told)
    alone = TransformersModel(hf_language())
    assert written(alone, tokens, held, drafter=Told(tuple(expected))).generated == expected
    # Without the pictures, or with them the other way round, it is another text; sampling goes as greedy does.
    others = (None, Embeddings(held.places, held.rows.flip(0)))
    assert all(written(model, tokens, other).generated != expected for other in others)
    sampler = Sampler.from_settings(temperature=1.0)
    drawn = written(model, tokens, held, sampler=sampler).generated
    assert drawn != expected and drawn == written(model, tokens, held, sampler=sampler, drafter=msd).generated
    # What one has read of a prompt serves those with the same pictures alone, and texts of one prompt share it.
    engine = Engine(model, prefixes=PrefixCache(1 << 20))
    cached = []
    for other in (held, *others, held):
        seq = engine.submit(Request(tokens, max_new_tokens=10, prompt_embeds=other))
        engine.run([seq])
        cached.append(seq.scheduling.cached)
        assert (seq.generated == expected) == (other is held)
    assert cached[:3] == [0, 0, 0] and cached[3]
    clone = Request(tokens, max_new_tokens=10, prompt_embeds=held)
    first = engine.submit(clone)
    engine.run([first, engine.submit(clone, like=first)])
    with pytest.raises(SettingsError, match="embeddings"):
        engine.submit(Request(tokens, prompt_embeds=others[1]), like=first)
    # The same from a text in which a placeholder stands for each picture, and from branches of a search.
    prompt = loaded.tokenizer.decode(PROMPT, special=True)
    lm = LLM(loaded)
    settings: dict[str, Any] = {
        "apply_chat_template": False,
        "max_new_tokens": 10,
        "placeholder": SPECIAL[2],
        "ignore_eos": True,
    }
    out = lm.generate(prompt, prompt_embeds=seen(), drafter=None, **settings)
    assert isinstance(out, Output) and out.prompt_tokens == lm.request(tokens, prompt_embeds=held).prompt == tokens
    assert out.tokens == expected
    (best,) = lm.search(prompt, "beam:width=1", prompt_embeds=seen(), **settings)
    assert best.tokens == expected


@pytest.mark.parametrize("images", [0, 1, 2])
def test_the_drafter_reads_embeddings_as_they_are_and_words_beside_states(loaded: LoadedModel, images: int) -> None:
    model = loaded.model
    assert isinstance(model, Transformer)
    parts = [torch.randn(size, 64) for size in (3, 5)[:images]]
    tokens, held = [5, 6, 7, 8, 9, 10, 6, 7], None
    if images:
        tokens, held = Embeddings.placed([5, 6, IMAGE, 7, 8, *[IMAGE, 9] * (images - 1), 10, 6], IMAGE, parts)
    drafter = MSD(trained(model), length=2, tree_policy=None)
    seq = Engine(model).submit(Request(tokens, max_new_tokens=4, drafter=drafter, prompt_embeds=held))
    head = MSDHead(drafter.trained, model)
    cache = model.new_cache()
    whole = [*tokens, 11]
    rows = model.forward(Batch([chunk(model, tokens, cache, held)]), taps=(0, -1)).hidden
    states, entered = model.final_norm(rows[-1]), rows[0]
    visual = np.zeros(len(whole), dtype=bool) if held is None else held.mask(0, len(whole))
    expected = []
    for place in range(len(tokens)):
        if visual[place + 1]:
            expected.append(entered[place + 1])
        else:
            both = torch.cat((model.embed_tokens(torch.tensor(whole[place + 1 : place + 2]))[0], states[place]))
            expected.append(head.parts.linear("fc")(both[None])[0])
    read: list[torch.Tensor] = []
    inner = head.layer.attention_of
    head.layer.attention_of = lambda stream, *others: read.append(stream) or inner(stream, *others)  # type: ignore
    seq.tokens.append(11)
    reading = HeadReading.begin(head)
    for first, end in ((0, 4), (4, len(tokens))):
        tree = DraftTree.chain(tokens[first], tokens[first + 1 : end])
        hidden = {-1: rows[-1][first:end]}
        seen_rows = VerificationFeedback(tree, torch.empty(0), hidden, list(range(1, end - first)), [], first)
        reading.see(seq, seen_rows)
    reading.after(DraftTree.root(11), [0])
    assert torch.equal(torch.cat(read), torch.stack(expected))
    # A head that reads states alone reads something else at the image's places, and there alone.
    other = EAGLEHead(trained(model, EAGLEHead), model)
    plain = other.inputs(states, model.embed_tokens(torch.tensor(whole[1:])))[0]
    assert np.array_equal((plain != torch.cat(read)).any(dim=1).numpy(), visual[1:])
    # It is taught on what it reads.
    given = {-1: rows[-1][None]} | ({} if held is None else {EMBEDDED: held.behind(0, len(tokens))[None]})
    (guess,) = head.unroll(given, torch.tensor([whole[1:]]), 1)
    assert reading.root is not None
    assert (head.project(guess.spoken[0, -1:])[0] - reading.root.logits).abs().max() < 1e-4


def test_a_head_learns_from_plain_texts_and_then_from_pictures(loaded: LoadedModel, tmp_path: Path) -> None:
    model = loaded.model
    prompts = [Embeddings.placed([5, IMAGE, number], IMAGE, seen()[number % 2 :][:1]) for number in range(4)]
    save_prompts(tmp_path / "prompts", prompts, model)
    found = read_prompts(tmp_path / "prompts", model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in prompts]
    assert all(torch.equal(ours.rows, theirs.rows) for (_, ours), (_, theirs) in zip(found, prompts, strict=True))
    corpus = write_texts(loaded, [[5, 6, number] for number in range(20)], tmp_path / "plain", max_new_tokens=4)
    shown = write_shown(loaded, found, tmp_path / "shown", 20, 4)
    assert shown.corpus[1].tokens.tolist()[: len(found[1][0])] == found[1][0]
    recipe = HeadRecipe(outputs=0, epochs=0.5, batch=4, length=16)
    train_head(Run(loaded, tmp_path / "both", (recipe,)), MSDHead, corpus, shown=shown)
    head = MSD(str(tmp_path / "both"), length=2, tree_policy=None)
    # Of each step, how many texts were shown pictures: none in the first half, more and more in the second.
    taken: list[int] = []

    class Noted(FeatureStore):
        def __getitem__(self, number: int) -> FeatureRows:
            taken.append(number)
            return super().__getitem__(number)

    raw = MSDHead(trained(model), model)
    plain = FeatureStore(model, corpus, raw.taps, tmp_path / "both" / "features", TOP, silent)
    noted = Noted(model, shown.corpus, raw.taps, tmp_path / "both" / "shown", TOP, silent, shown.embeddings)
    learned, out = corpus.split()
    training_run = _HeadTraining(raw, _StoredTexts(plain, learned, out), _StoredTexts(noted, learned, out), recipe, 20)
    counts = []
    for step in range(20):
        taken.clear()
        assert training_run.loss(step).isfinite()
        counts.append(len(taken))
    assert not any(counts[:11]) and 0 < sum(counts[11:15]) < sum(counts[16:]) and max(counts) <= recipe.batch
    tokens, held = found[0]
    assert written(model, tokens, held, drafter=head).generated == written(model, tokens, held).generated


def test_what_does_not_fit_together_is_refused_in_a_sentence(loaded: LoadedModel) -> None:
    tokens, held = Embeddings.placed(PROMPT, IMAGE, seen())
    engine, rows = Engine(loaded.model), held.rows
    for wrong in (
        lambda: Embeddings.placed(PROMPT, IMAGE, seen()[:1]),
        lambda: Embeddings.placed([1, 2], IMAGE, seen()[:1]),
        lambda: Embeddings(np.arange(2), rows[:3]),
        lambda: Embeddings(np.array([1, 1]), rows[:2]),
        lambda: Embeddings(np.arange(2), rows[:2] * torch.inf),
        lambda: engine.submit(Request(tokens[:4], prompt_embeds=held)),
        lambda: engine.submit(Request(tokens, prompt_embeds=Embeddings(held.places, rows[:, :8]))),
        lambda: LLM(loaded).generate("a", prompt_embeds=seen(), placeholder="none such"),
        lambda: engine.submit(Request(tokens, prompt_embeds=held, logits_source="guidance:scale=1.5")),
    ):
        with pytest.raises((PromptError, SettingsError), match=r"[a-z]"):
            wrong()
    # A part may be written once, or as often as it has rows.
    assert Embeddings.placed(tokens, IMAGE, seen())[0] == tokens
