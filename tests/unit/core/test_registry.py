"""Methods are found by name, built from one text, and described the way users see them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodery.compression.base import ModelCompression
from decodery.constraints.base import ConstraintSpec
from decodery.core import registry
from decodery.core.catalogue import catalogue
from decodery.core.errors import SettingsError, UnknownMethod
from decodery.core.registry import Method, family_of, method_of, methods, register, resolve
from decodery.diffusion.base import DiffusionDecoder
from decodery.diffusion.cache.base import DiffusionCache
from decodery.diffusion.experts.base import ExpertSharing
from decodery.sampling import LogitBias, LogitsProcessor, MinNewTokens, Stage, TopK, TopP
from decodery.sampling.constraint import Constraint
from decodery.search.base import Search
from decodery.speculative.acceptance.lookahead import LookaheadRule
from decodery.speculative.drafters.combine import Cascade, Union
from decodery.speculative.drafters.copyspec import CopySpec
from decodery.speculative.drafters.suffix_tree import SuffixTree
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.cache_policy import CachePolicy
from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import DraftLengthPolicy
from decodery.step.drafter import Drafter
from decodery.step.forward_request import Composed
from decodery.step.logits_source import LogitsSource
from decodery.step.monitor import Monitor
from decodery.step.scorer import Scorer
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

pytestmark = pytest.mark.usefixtures("own_methods")


class Nothing(LogitsProcessor):
    stage = Stage.EDIT

    def process(self, logits: Any, contexts: Any) -> Any:
        return logits


@dataclass(frozen=True)
class Settings(Nothing):
    """Has a setting of every kind.

    More about it.
    """

    whole: int
    real: float = 0.5
    switch: bool = False
    text: str = "a"
    maybe: int | None = 3
    which: Literal["x", "y"] = "x"
    several: tuple[int, ...] = ()
    pairs: tuple[tuple[int, float], ...] = ()


def of_the_package() -> list[Method]:
    """All methods but those of the benchmarks, which other tests may have imported."""
    return [method for method in methods() if method.cls.__module__.startswith("decodery.")]


def test_every_method_is_described() -> None:
    found = of_the_package()
    assert {"top-p", "coupled", "prompt-lookup"} <= {method.name for method in found}
    for method in found:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*(\+\+)?", method.name)
        assert method.summary.endswith(".") and method.guarantee and method.family in registry.FAMILIES
        assert (method.year is None) == (method.paper is None), f"{method.name}: write the paper as 'Title (year)'"
        assert f"decodery.{registry.FAMILIES[method.family]}." in method.cls.__module__ + "."
        keys = [
            "name",
            "family",
            "paper",
            "year",
            "guarantee",
            "lossless",
            "requirements",
            "provides",
            "slower",
            "ready",
            "summary",
        ]
        assert list(method.as_dict()) == keys


def test_the_catalogue_says_what_the_methods_say_without_importing_them() -> None:
    code = "from decodery.core import registry; import sys; print(len(registry.descriptions()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(of_the_package())), "False"]
    assert [said.as_dict() for said in registry.descriptions()] == [method.as_dict() for method in methods()]
    assert [registry.method(said) for said in registry.descriptions()] == methods()


@pytest.mark.parametrize(
    ("family", "base"),
    [
        *(
            ("drafter", Drafter),
            ("tree-policy", TreePolicy),
            ("acceptance-rule", AcceptanceRule),
            ("logits-processor", LogitsProcessor),
        ),
        *(
            ("logits-source", LogitsSource),
            ("search", Search),
            ("draft-length", DraftLengthPolicy),
            ("diffusion", DiffusionDecoder),
            ("diffusion-cache", DiffusionCache),
        ),
        ("expert-sharing", ExpertSharing),
        *(("cache-policy", CachePolicy), ("compression", ModelCompression), ("monitor", Monitor)),
    ],
)
def test_whatever_a_family_lists_can_do_what_the_family_is_for(family: str, base: type) -> None:
    assert all(issubclass(method.cls, base) for method in methods(family))


def test_a_name_of_another_family_says_whose_it_is() -> None:
    with pytest.raises(
        UnknownMethod, match=r"no acceptance-rule method is called 'density-ratio': .* continuous-acceptance method"
    ):
        resolve("acceptance-rule", "density-ratio")


def test_methods_of_one_family_are_sorted_and_unique() -> None:
    names = [method.name for method in methods("logits-processor")]
    assert names == sorted(set(names)) and "coupled" not in names
    with pytest.raises(UnknownMethod, match="families are draft"):
        methods("sampel")


def test_a_name_an_instance_and_a_text_resolve() -> None:
    assert resolve("logits-processor", "top-k") == TopK()
    assert resolve("logits-processor", " top-k : k = 7 ") == TopK(7)
    own = TopP(0.3)
    assert resolve("logits-processor", own) is own
    assert resolve("logits-processor", "logit-bias:bias=12:-100/40:2.5") == LogitBias(((12, -100.0), (40, 2.5)))
    assert resolve("logits-processor", "min-new-tokens:count=3,eos=1/2") == MinNewTokens(3, (1, 2))


def test_every_kind_of_field_is_read_from_text() -> None:
    register("settings")(Settings)
    text = "settings:whole=-4,real=1e-3,switch=yes,text=a b,maybe=none,which=y,several=1/2/3,pairs=1:0.5/2:-1"
    expected = Settings(-4, 0.001, True, "a b", None, "y", (1, 2, 3), ((1, 0.5), (2, -1.0)))
    assert resolve("logits-processor", text) == expected
    assert resolve("logits-processor", "settings:whole=1,maybe=5,several=,switch=False") == Settings(1, maybe=5)


def test_a_setting_that_is_a_method_keeps_its_own_settings_in_parentheses() -> None:
    register("settings")(Settings)
    assert resolve("logits-processor", "settings(whole=1, text=a)") == Settings(1, text="a")
    assert resolve("logits-processor", "settings:text=inner(x=1/2,y=z(u=3)),whole=1") == Settings(
        1, text="inner(x=1/2,y=z(u=3))"
    )
    quoted = resolve("logits-processor", 'settings:text="a(b,c/d",whole=1')
    assert quoted == Settings(1, text="a(b,c/d")
    fused = resolve(
        "drafter", "union:drafters=copyspec(gamma=1,length=4)/cascade(drafters=copyspec/suffix-tree(nodes=3))"
    )
    assert fused == Union((CopySpec(gamma=1, length=4), Cascade((CopySpec(), SuffixTree(nodes=3)))))


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.lists(st.integers()))
def test_what_python_prints_is_read_back(whole: int, real: float, switch: bool, several: list[int]) -> None:
    register("settings")(Settings)
    text = f"settings:whole={whole},real={real},switch={switch},several={'/'.join(map(str, several))}"
    assert resolve("logits-processor", text) == Settings(whole, real, switch, several=tuple(several))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("top-q", r"no logits-processor method is called 'top-q'; try top-p, top-k and top-h"),
        ("prompt-lookup", r"no logits-processor method is called 'prompt-lookup'"),
        ("", r"no logits-processor method is called ''"),
    ],
)
def test_an_unknown_name_names_the_nearest(spec: str, said: str) -> None:
    with pytest.raises(UnknownMethod, match=said):
        resolve("logits-processor", spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("top-p:q=0.5", "top-p has no setting 'q'; its settings are p"),
        ("top-p:p=high", "top-p: p=high is not a number"),
        ("top-p:0.5", "'0.5' is not key=value; its settings are p"),
        ("top-p:p=0.5,p=0.6", "p is given twice"),
        ("top-p:p=1.5", "top-p must be a finite number above 0 and at most 1, not 1.5"),
        ("top-p:p=nan", "top-p must be"),
        ("top-k:k=1.5", "k=1.5 is not an integer"),
        ("settings", "settings needs whole, as in settings:whole=..."),
        ("settings:whole=1,switch=maybe", "switch=maybe is not true or false"),
        ("settings:whole=1,maybe=x", "maybe=x is not an integer or none"),
        ("settings:whole=1,which=z", "which=z is not x or y"),
        ("settings:whole=1,several=1/b", "several=1/b is not a list like a/b/c"),
        ("settings:whole=1,pairs=1", "pairs=1 is not a list like a:b/c:d"),
        ("settings:text=a(b,whole=1", "the parentheses in 'text=a(b,whole=1' do not match"),
        ("settings(whole=1)(text=a)", "the parentheses in 'whole=1)(text=a' do not match"),
        ("settings(whole=1", "the parentheses in 'settings(whole=1' do not match"),
        ("settings(whole=1)text", "the parentheses in 'settings(whole=1)text' do not match"),
    ],
)
def test_a_bad_setting_is_named_in_one_sentence(spec: str, said: str) -> None:
    register("settings")(Settings)
    with pytest.raises(SettingsError) as caught:
        resolve("logits-processor", spec)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_method_of_another_family_is_refused() -> None:
    with pytest.raises(SettingsError, match="not an instance of a acceptance-rule method"):
        resolve("acceptance-rule", TopK())
    with pytest.raises(SettingsError, match="not an instance of a logits-processor method"):
        resolve("logits-processor", TopK)
    with pytest.raises(SettingsError, match="5 is not an instance of a drafter method"):
        resolve("drafter", 5)


def test_a_users_class_joins_the_family_of_its_base(own_methods: None) -> None:
    @register("mine", paper="A Title (1999)", requirements=["hidden states"], lossless=True)
    @dataclass(frozen=True)
    class Mine(Nothing):
        """Does nothing.

        And more.
        """

    assert family_of(Mine) == "logits-processor" and resolve("logits-processor", "mine") == Mine()
    method = method_of(Mine())
    assert method is not None and method in methods("logits-processor")
    assert (method.paper, method.year, method.summary) == ("A Title (1999)", 1999, "Does nothing.")
    assert method.requirements == ("hidden states",) and method.lossless and method.guarantee
    with pytest.raises(SettingsError, match="it has no settings"):
        resolve("logits-processor", "mine:a=1")


def test_a_class_that_cannot_be_a_method_is_refused(own_methods: None) -> None:
    with pytest.raises(TypeError, match="frozen dataclass"):
        register("plain")(Nothing)
    with pytest.raises(TypeError, match="frozen dataclass"):

        class Child(TopK):
            """Inherits a dataclass without being one."""

        register("child")(Child)
    with pytest.raises(TypeError, match="no family"):

        @register("stray")
        @dataclass(frozen=True)
        class Stray:
            """Belongs nowhere."""

    assert method_of(object()) is None


def test_a_taken_name_is_refused_and_a_reload_is_not(own_methods: None) -> None:
    register("settings")(Settings)
    register("settings")(Settings)
    with pytest.raises(ValueError, match="already registered by TopP"):
        register("top-p")(Settings)


def test_a_name_of_this_package_is_taken_before_its_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "logits-processor", {})
    with pytest.raises(ValueError, match="'top-p' is already registered by TopP: choose another name"):
        register("top-p")(Settings)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (Drafter, r'define propose\(seq, budget\), "Propose a tree rooted at the last token'),
        (TreeDrafter, r'define logits\(seq, tree, nodes\), "The drafter\'s own logits'),
        (Composite, r'define parts \(a property\), "The combined drafters."'),
        (TreePolicy, r"define grow\(expander, seq, budget\), "),
        (AcceptanceRule, r"define choose\(tree, laws, seq\), "),
        (LookaheadRule, r"define decide\(view, node\), "),
        (LogitsProcessor, r"define process\(logits, contexts\), "),
        (LogitsSource, r"define over\(model, prompt\), "),
        (Composed, r"define capabilities \(a property\), "),
        (
            Constraint,
            r"define advance\(state, token\), .* and allowed\(state\), .* and init.* and is_complete\(state\), ",
        ),
        (ConstraintSpec, r"define compile\(vocabulary\), "),
        (Search, r"define find\(engine, request, progress\), "),
        (Scorer, r"define score\(candidates\), "),
    ],
)
def test_a_class_that_leaves_something_out_is_told_what_to_write(base: type, said: str) -> None:
    unfinished = dataclass(frozen=True)(type("Mine", (base,), {}))
    with pytest.raises(TypeError, match=f"Mine is not complete: {said}") as caught:
        unfinished()
    assert "\n" not in str(caught.value)


def test_a_method_that_leaves_something_out_is_not_registered() -> None:
    with pytest.raises(TypeError, match=r"Mine is not complete: define propose\(seq, budget\)"):
        register("mine")(dataclass(frozen=True)(type("Mine", (Drafter,), {})))
    with pytest.raises(TypeError, match="no family"):
        register("mine")(dataclass(frozen=True)(type("Mine", (Composed,), {"compose": None})))
    assert "mine" not in {method.name for method in methods()}


@pytest.mark.integration
def test_threads_that_ask_at_once_all_know_the_methods() -> None:
    code = (
        "import threading\n"
        "from decodery.core.registry import resolve\n"
        "begin, errors = threading.Barrier(8), []\n"
        "def ask():\n"
        "    begin.wait()\n"
        "    try: resolve('drafter', 'token-recycling')\n"
        "    except Exception as error: errors.append(str(error))\n"
        "threads = [threading.Thread(target=ask) for _ in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(errors)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_name_imports_its_own_module_only() -> None:
    code = (
        "import sys; from decodery.core.registry import resolve; resolve('search', 'beam:width=2')\n"
        "searches = [name for name in sys.modules if name.startswith('decodery.search.')]\n"
        "assert 'decodery.search.beam' in searches and 'decodery.search.mcts' not in searches\n"
        "print(len([name for name in sys.modules if name.startswith('decodery')]))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_broken_module_breaks_its_own_methods_only(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = catalogue("search")["beam"].module
    monkeypatch.setattr(registry, "_discovered", set())
    monkeypatch.setattr(registry, "_beginning", set())
    real = registry.importlib.import_module

    def importing(name: str) -> Any:
        if name == broken:
            raise RuntimeError("broken on purpose")
        return real(name)

    monkeypatch.setattr(registry.importlib, "import_module", importing)
    with pytest.warns(UserWarning, match=f"the methods of {broken} are left out: RuntimeError: broken on purpose"):
        found = methods("search")
    assert len(found) > 20
    assert resolve("search", "diverse-beam") is not None
    with pytest.raises(RuntimeError, match="broken on purpose"):
        resolve("search", "beam:width=2")
