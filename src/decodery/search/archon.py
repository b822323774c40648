"""Archon: layers of generators, critics, rankers, fusers, verifiers and tests, as one search."""

from __future__ import annotations

import typing
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from decodery.core.errors import NotTrusted, SettingsError
from decodery.core.method_spec import MOST_NUMBER, given, is_untrusted, listing, parts
from decodery.core.registry import register
from decodery.engine.calls import Calls
from decodery.models.loaders.store import Progress
from decodery.step.forward_request import ForwardCoroutine, gather
from decodery.step.sequence import Sequence

from .archon_layers import COMPONENTS, Component, Critic, Evaluator, Fuser, Generator, LayerState, Ranker, UnitTests
from .pipeline import Pipeline

Layers = tuple[tuple[str, ...], ...]


@register(
    "archon",
    paper="Archon: An Architecture Search Framework for Inference-Time Techniques (2024)",
    guarantee="none: as good as the model's judgement; one generator of n=1 is plain decoding",
    requirements=("a prompt that is text or chat",),
    texts=("layers",),
)
@dataclass(frozen=True)
class Archon(Pipeline):
    """Passes candidates through layers that generate, criticise, rank, fuse or test.

    Components: generator (n, temperature), critic (tries), ranker (top_k), fuser (n, temperature), verifier, unit-tests
    (most), evaluator (top_k). The first layer generates, and no other does; critics, rankers, verifiers and tests are
    alone in their layer; a critic comes before a ranker or a fuser, and an evaluator right after unit-tests. All that a
    layer asks for shares passes. Where several candidates are left, the first is the best: they are in the order of the
    last ranker or evaluator (the published code draws one). All ask at the request's temperature, 0.7 in the paper.

    Each component may have a model of its own. For a model on a server that is the URL of another server, with
    #NAME where it has several models, as in generator(n=2,model=http://localhost:8001#large). Else it is a model with
    the same tokens, which reads prompts in the chat template of the first one.

    Verdicts are read in brackets alone: [2] > [1], [Correct], [Passed]. A model that is run here is held to that by a
    constraint; what a server says without them is asked for again at another seed, 10 times at most in all, and counted
    as `malformed`. A ranking that is never read leaves the order, and a verdict is then no pass. `cost` says how many
    texts are asked for without that.

    Attributes:
        layers: Of components, separated by /, those of one layer by :, as in
            generator(n=4)/critic/ranker(top_k=2)/fuser.
    """

    layers: Layers = (("generator(n=4)",), ("critic",), ("ranker",), ("fuser",))

    def __post_init__(self) -> None:
        check_layers(self.built())

    def built(self) -> list[list[Component]]:
        return [[_component(each) for each in layer] for layer in self.layers]

    def cost(self) -> int:
        """Texts that are asked for at most, if nothing has to be asked again."""
        return sum(self._asked())

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return max(self._asked())

    def _asked(self) -> list[int]:
        """Texts that each layer asks for at most."""
        asked, candidates = list[int](), 0
        for layer in self.built():
            found = [component.calls(candidates) for component in layer]
            asked.append(sum(each for each, _ in found))
            candidates = sum(left for _, left in found)
        return asked

    def follow(self, calls: Calls, progress: Progress) -> ForwardCoroutine[list[Sequence]]:
        state = LayerState()
        for layer in self.built():
            found = yield from gather([component.apply(calls, state, progress) for component in layer])
            state = found[0]
            for other in found[1:]:
                state = LayerState(state.candidates + other.candidates, state.critiques + other.critiques, state.tests)
            calls.standing = list(state.candidates)
        return list(state.candidates)


def check_layers(layers: Ordered[Ordered[Component]]) -> None:
    """Raise SettingsError with the rule of construction that is broken, where one is."""
    if not layers or not all(layers):
        raise SettingsError("archon needs layers, and components in each: begin with generator(n=4)")
    for number, layer in enumerate(layers):
        following = layers[number + 1][0] if number + 1 < len(layers) else None
        before = layers[number - 1][0] if number else None
        for component in layer:
            if isinstance(component, Generator) != (number == 0):
                raise SettingsError("archon generates in its first layer and in no other: begin with generator(n=4)")
            if len(layer) > 1 and not isinstance(component, Generator | Fuser):
                raise SettingsError(f"a {_name(component)} of archon is alone in its layer: separate layers by /")
            if isinstance(component, Critic) and not isinstance(following, Ranker | Fuser):
                raise SettingsError(
                    "a critic of archon must stand right before a ranker or a fuser: no other layer reads it"
                )
            if isinstance(component, Evaluator) and not isinstance(before, UnitTests):
                raise SettingsError("an evaluator of archon comes right after unit-tests: put them before it")
            if isinstance(component, UnitTests) and not isinstance(following, Evaluator):
                raise SettingsError("unit-tests of archon come right before an evaluator: put one after them")


def _name(component: Component) -> str:
    return next(name for name, kind in COMPONENTS.items() if type(component) is kind)


def _component(text: str) -> Component:
    """A component from its text, such as generator(n=4)."""
    name, settings = parts(text)
    if name not in COMPONENTS:
        raise SettingsError(f"archon has no component {name!r}: its components are {listing(list(COMPONENTS))}")
    kind = COMPONENTS[name]
    values = given(name, settings, typing.get_type_hints(kind))
    if any(isinstance(value, int) and value > MOST_NUMBER for value in values.values()):
        raise SettingsError(f"a {name} of archon needs {MOST_NUMBER} texts at most: {text}")
    if is_untrusted() and "model" in values:
        raise NotTrusted(f"the model of a {name} of archon is not for requests from a network: leave it out")
    found: Component = kind(**values)
    return found
