"""The example that extracts by writing code: what the grammar lets pass, and what the reader makes of it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from decodery.core.errors import ConstraintError
from decodery.sampling.constraint import Constraint
from languages import VOCABULARY, accepts

SENTENCE = 'Ada Okafor, born in Lima, runs "Acme \\ Sons" with Marie.'


@pytest.fixture(scope="module")
def extraction() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "extraction.py"
    spec = importlib.util.spec_from_file_location("extraction", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["extraction"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def constraint(extraction: ModuleType) -> Constraint:
    return extraction.grammar(SENTENCE).compile(VOCABULARY)


def answer(*items: str) -> str:
    return "results = [" + ",".join(f"\n    {item}" for item in items) + ("\n]" if items else "]")


def test_gold_answers_pass_and_are_read(extraction: ModuleType, constraint: Constraint) -> None:
    people, places = ("Ada", "Ada Okafor", "Marie"), ("Lima", "Acme \\ Sons", "Okafor, born in Lima")
    for person, place in itertools.product(people, places):
        human, city = (f"{kind}({extraction.json.dumps(name)})" for kind, name in (("Human", person), ("City", place)))
        scientist = human.replace("Human", "Scientist")
        events = [
            f'Founding("runs", founder=[{founders}], organization=[{bodies}])'
            for founders in ("", f"{human}, {scientist}")
            for bodies in ("", 'Organization("Acme")')
        ]
        related = (human, city, f"PlaceOfBirth({human}, {city})", f"PlaceOfBirth({scientist}, {city})")
        for items in ((), (human,), related, (human, *events)):
            assert accepts(constraint, answer(*items)), items
            found = extraction.parse(answer(*items), SENTENCE)
            assert len(found) == len(items)
            if items:
                assert found[0].value == extraction.Human(person)
                assert all(SENTENCE[start:end] == person for start, end in found[0].spans[person])


@pytest.mark.parametrize(
    "item",
    [
        *(
            'Animal("Ada")',
            'Human("Eve")',
            'Human("Ad")',
            'Human("")',
            "Human()",
            'Human("Ada", "Marie")',
            'Human(Human("Ada"))',
        ),
        *('PlaceOfBirth(City("Lima"), City("Lima"))', 'PlaceOfBirth("Ada", "Lima")', '__import__("Ada")', '"Ada"'),
        *('Founding("runs")', 'Founding("runs", [], [])', 'Founding("runs", organization=[], founder=[])'),
        *('Founding("runs", founder=[], organization=[City("Lima")])', 'Founding("run", founder=[], organization=[])'),
        *(
            'Founding("runs", founder=["Ada"], organization=[])',
            'Founding("runs", founder=Human("Ada"), organization=[])',
        ),
        *('Human(name="Ada")', 'Human("Ada" + "Ada")', 'Human("Okafor Ada")', "Human(", 'Human("Ada").name'),
    ],
)
def test_mutated_answers_do_not_pass(extraction: ModuleType, constraint: Constraint, item: str) -> None:
    assert not accepts(constraint, answer(item))
    with pytest.raises(ValueError, match=r"not|takes"):
        extraction.parse(answer(item), SENTENCE)


def test_offsets_are_those_of_whole_words(extraction: ModuleType) -> None:
    sentence = "Adam met Ada; Ada Ada left."
    assert [sentence[a:b] for a, b in extraction.offsets("Ada", sentence)] == ["Ada"] * 3
    assert extraction.offsets("Ada", sentence)[0] == (9, 12)
    assert extraction.offsets("a a", "a a a a") == [(0, 3), (4, 7)]
    assert extraction.offsets("Ad", sentence) == extraction.offsets("", sentence) == []


def test_the_prompt_is_python_with_solved_examples(extraction: ModuleType) -> None:
    gold = answer('Human("Ada")')
    text = extraction.prompt(SENTENCE, examples=[("Ada came.", gold)]) + gold
    names = [node.name for node in extraction.ast.parse(text).body if isinstance(node, extraction.ast.ClassDef)]
    assert names == ["Entity", "Relation", "Event", *(cls.__name__ for cls in extraction.CLASSES)]
    assert "founder: list[Human]" in text and "class Scientist(Human):" in text
    assert extraction.parse(gold, "Ada came.")[0].spans == {"Ada": [(0, 3)]}


def test_what_is_written_is_read(extraction: ModuleType, smollm2_int8) -> None:
    for sentence in ("Nobody was there.", "Zoë met Łukasz at “Café 7” in Łódź."):
        found = extraction.extract(smollm2_int8, sentence, temperature=1.0, seed=3, max_new_tokens=400)
        for each in found:
            assert all(text in sentence for text in each.spans)


def test_a_sentence_cannot_break_out_of_the_grammar(extraction: ModuleType) -> None:
    for sentence in ('"] | /.*/ //', "%json", "a\n%ignore /.*/\nb", "/x/"):
        try:
            compiled = extraction.grammar(sentence).compile(VOCABULARY)
        except ConstraintError:
            continue
        assert accepts(compiled, "results = []") and not accepts(compiled, "anything")
