"""Monitor-guided decoding: after a dot only what the analyser names, under any drafter, and nothing elsewhere."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
from functools import cache
from pathlib import Path
from threading import Event, current_thread

import numpy as np
import pytest

from decodery.constraints import Monitor
from decodery.constraints.analyser import Analyser, analyser
from decodery.constraints.monitor import MonitorConstraint
from decodery.constraints.place import BREAKING, CodePosition
from decodery.core.errors import ConstraintError, SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling import LogitBias, Sampler, Temperature
from decodery.sampling.constraint import Constrained
from decodery.search.beam import Beam
from decodery.speculative.acceptance.awrs import AWRS
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.speculative.drafters.token_recycling import TokenRecycling
from decodery.testing import check_batch, check_constraint, check_identical, decode, tiny_transformer, to_int8

HERE = Path(__file__).parents[2] / "support"
PACKAGE = HERE / "parcels"
EOS = 256
MERGED = [
    *("grams", "gr", "ams", "kilo", "kilos", "barcode", "bar", "code", "destination", "house", "_no", "no", "note("),
    *("self", "self.", ".grams", ".kilos(", ").", ").town", "road)", "road.", "cents ", "cents\n", ".\n", ". ", "...."),
    *("total_", "total_grams()", "tour", "__", "__class__", "_stored", "parcel", "    ", "append", "upper", ' ".town'),
]  # fmt: skip
PIECES = [bytes([byte]) for byte in range(256)] + [b"<eos>"] + [text.encode() for text in MERGED] + [b"", b"<extra>"]
SIZE = len(PIECES)


def _encode(text: str) -> list[int]:
    ids: list[int] = []
    ranked = sorted(MERGED, key=len, reverse=True)
    while text:
        found = next((each for each in ranked if text.startswith(each)), None)
        ids += [257 + MERGED.index(found)] if found else list(text[0].encode())
        text = text[len(found or text[0]) :]
    return ids


VOCABULARY = Vocabulary(PIECES, frozenset({EOS, SIZE - 1}), (EOS,), _encode)
TARGET = to_int8(tiny_transformer(2, vocab_size=SIZE))
HEAD = "from parcels.models import Parcel, Depot\n\ndef f(parcel: Parcel, depot: Depot):\n    "


ASKED = Monitor.names


@cache
def known(monitor: Monitor, code: str) -> list[str] | None:
    """What the analyser says; of one text always the same."""
    return ASKED(monitor, code)


@pytest.fixture(autouse=True)
def _asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Monitor, "names", known)


@cache
def compiled(**settings: object) -> MonitorConstraint:
    return Monitor(**{"project": str(HERE), "seconds": 120.0, **settings}).compile(VOCABULARY)


def state_of(constraint: MonitorConstraint, text: str):
    return constraint.init(list(text.encode()))


DOTS: dict[str, bytes | None] = {
    "a.": b"", "a.b": b"b", "a.b.": b"", "a.b(": None, "f().": b"", "x[1].ab": b"ab", "{}.": b"", "'s'.": b"",
    '"".': b"",
    '"""a""".': b"", "a.b c": None, "a .": b"", "(a\n  .": b"", "a \\\n .x": b"x", "None.": b"", "é.ü": "ü".encode(),
    "1.": None, "1.e5.": None, "1..": None, "0x1f.": None, "x1.": b"", "x = .": None, "...": None, "x...": None,
    "[...": None, "return .": None, "from .": None, "from ..a.": None, "from . import a; b.": b"", "from os.": b"",
    "import os.": b"", "from .a import (b)\nc.": b"", "# a.": None, "# a\nb.": b"", "'a.": None, "'a\\'b.": None,
    "'a\nb.": b"", "'''a\nb.": None, "'''a'b.": None, "'''a''' + b.": b"", "r'\\' + a.": None, "r'a\\\\' + b.": b"",
    "f'a.": None, "f'{a.": b"", "f'{a.b}.": None, "f'{a.b}' + c.": b"", "f'{{a.": None, "f'{a:>{b.": b"",
    "f'{a:.": None, "f'{a:>{b}.": None, "f'{a:.2f} {b.": b"", "f'{d[\"k\"].": b"", "f'{a['x'].": b"", "rb'.' + a.": b"",
    "'{a.": None, "a\n.": None, "a.\nb": None, "a. b": None, "x = 'it' # a\ny.z": b"z", "f'''{a}\n{b.": b"",
    "'' ''.": b"",
    "self.": None,
    "x = self.": b"",
    "a\n  self.b.": b"",
    "if a: cls.b": None,
    "(\nself.": b"",
    "a.self.": b"",
    "selfie.": b"",
    "f'{x}'.": b"", "f'{f'{a.": b"", "lambda: a.": b"", "d = {a: b.": b"", "f'\\{a.": b"",
}  # fmt: skip


@pytest.mark.parametrize("text", DOTS)
def test_a_place_knows_the_dots_of_attributes(text: str) -> None:
    data = text.encode()
    assert CodePosition().after(data).since == DOTS[text]
    for cut in range(len(data)):
        assert CodePosition().after(data[:cut]).after(data[cut:]) == CodePosition().after(data)


def _rule(piece: bytes, id: int, rests: tuple[bytes, ...]) -> bool:
    """The published rule for one token, in plain words."""
    if id in VOCABULARY.special_ids:
        return id == EOS and b"" in rests
    if not piece or re.search(rb"\.\s*[A-Za-z_]", piece) or re.search(rb"\.\s+$", piece):
        return False
    return any(
        rest.startswith(piece) or (piece.startswith(rest) and piece[len(rest)] in BREAKING and piece != rest)
        for rest in rests
    )


def _fixture_dots() -> list[tuple[str, str]]:
    """Texts of the package's modules up to a dot, and the name after it."""
    found = []
    for path in sorted(PACKAGE.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                line, column = node.value.end_lineno, node.value.end_col_offset
                before = "".join(lines[: line - 1]) + lines[line - 1][:column] + "."
                found.append((before, node.attr))
    return found


def test_masks_are_those_of_the_rule_on_fifty_dots() -> None:
    constraint = compiled(path=str(PACKAGE / "module.py"))
    dots = _fixture_dots()
    bound = right = 0
    masks: dict[tuple[bytes, ...], list[bool]] = {}
    for before, name in dots:
        names = constraint.monitor.names(before)
        state = state_of(constraint, before)
        off = names is None or state.place.since is None
        assert constraint.is_complete(state) == off
        if off:
            continue
        bound += 1
        right += name in names
        for count in (0, len(name)):
            rests = tuple(sorted(each[count:].encode() for each in names if each.startswith(name[:count])))
            if rests not in masks:
                masks[rests] = [_rule(piece, id, rests) for id, piece in enumerate(PIECES)]
            mask = constraint.allowed(state_of(constraint, before + name[:count]))
            assert mask.tolist() == masks[rests], (before, name, count)
        if bound == 50:
            break
    assert bound == 50 and right > 45


def test_the_laws_of_constraints_hold() -> None:
    for settings in ({}, {"strict_dot": False, "underscores": False}):
        constraint = compiled(**settings)
        for text in ("return parcel.", "return depot.to", "x = 1\n"):
            check_constraint(constraint, (EOS,), prompt=_encode(HEAD + text), walks=3, length=12)


def sampler(constraint: MonitorConstraint, temperature: float = 1.0) -> Sampler:
    # Random models write dots and names too rarely.
    bias = {VOCABULARY.encode(text)[0]: 3.0 for text in (".", "parcel", "self.", ").", "(", "\n", "note(")}
    return Sampler((Constrained(constraint), LogitBias(bias), Temperature(temperature)))


PROMPTS = [
    _encode(HEAD + text) for text in ("return parcel.", "depot.hand_out('a').", "x = 1\n    ", "print(parcel.de")
]


def test_no_attribute_is_written_that_was_not_named() -> None:
    constraint = compiled()
    seen = 0
    for seq in decode(TARGET, PROMPTS, sampler=sampler(constraint), seeds=range(2), max_new_tokens=30, eos_ids=(EOS,)):
        whole = VOCABULARY.bytes_of(seq.tokens)
        first = len(VOCABULARY.bytes_of(seq.tokens[: seq.request.prompt_length]))
        for end in range(first, len(whole)):
            place = CodePosition().after(whole[:end])
            if place.since is None or whole[end] not in BREAKING:
                continue
            names = constraint.monitor.names(whole[: end - len(place.since)].decode("utf-8", "replace"))
            if names is not None:
                seen += 1
                assert place.since.decode() in names, whole
    assert seen > 5


@pytest.mark.parametrize("settings", [{}, {"policy": "soft", "strict_dot": False}])
def test_speculation_and_batches_change_nothing(settings: dict) -> None:
    constraint = compiled(**settings)
    for drafter in (Forced(PromptLookup(length=5)), Forced(TokenRecycling(nodes=12, scope="request")))[
        bool(settings) :
    ]:
        for each in (sampler(constraint), sampler(constraint, 0.0)):
            check_identical(
                TARGET, PROMPTS[:2], drafter=drafter, sampler=each, seeds=(1,), max_new_tokens=16, eos_ids=(EOS,)
            )
        check_batch(TARGET, PROMPTS[:2], drafter=drafter, sampler=sampler(constraint), seeds=(1,), max_new_tokens=14)


def test_drafts_that_are_taken_back_leave_no_trace() -> None:
    constraint, chance = compiled(), np.random.default_rng(0)
    state = state_of(constraint, HEAD + "return parcel.")
    tokens: list[int] = []
    for _ in range(15):
        for _ in range(2):
            ahead = state
            for token in chance.integers(SIZE, size=3).tolist():
                ahead = constraint.advance(ahead, token)
            constraint.allowed(ahead)
        mask = constraint.allowed(state)
        fresh = state_of(MonitorConstraint(constraint.monitor, VOCABULARY), HEAD + "return parcel.")
        for token in tokens:
            fresh = constraint.advance(fresh, token)
        assert np.array_equal(mask, constraint.allowed(fresh))
        tokens.append(int(chance.choice(np.flatnonzero(mask))))
        state = constraint.advance(state, tokens[-1])
        if state.ended:
            break


def test_an_idle_monitor_hands_on_the_very_logits() -> None:
    processor = Constrained(compiled(strict_dot=False))
    states = [
        state_of(compiled(strict_dot=False), text)
        for text in ("x = 1", "# a.", "unknown.", "import keyword\nkeyword.zzz")
    ]
    contexts = [Sampler([]).context([1], 1, state) for state in states]
    import torch

    logits = torch.randn(len(contexts), SIZE)
    assert processor.process(logits, contexts) is logits


def test_policies() -> None:
    text = "class A:\n    def __getattr__(self, n):\n        return n\nA()."
    assert compiled().monitor.names(text) and compiled(policy="off_if_any").monitor.names(text) is None
    text = "class A(Elsewhere):\n    y = 1\nA()."
    assert compiled().monitor.names(text) == ["y"] and compiled(policy="off_if_any").monitor.names(text) is None
    assert "grams" in compiled(policy="off_if_any").monitor.names(HEAD + "parcel.")
    called = "def f(x):\n    return x.\n\nf('a')\n"
    assert compiled(policy="off_if_any").monitor.names(called.partition(".")[0] + ".") is None
    assert "town" in compiled(underscores=False).monitor.names(HEAD + "depot.")
    assert not any(name.startswith("_") for name in compiled(underscores=False).monitor.names(HEAD + "depot."))
    soft = compiled(policy="soft")
    state = state_of(soft, HEAD + "depot.")
    assert soft.permits(state, ord("z")) and not soft.forced(state, 3)
    import torch

    context = Sampler([]).context([1], 1, state)
    change = Constrained(soft).process(torch.zeros(1, SIZE), [context])[0]
    assert set(change.tolist()) == {0.0, -5.0} and change[ord("t")] == 0


def test_names_inside_tokens_are_seen_or_not_written() -> None:
    strict, lax = compiled(), compiled(strict_dot=False)
    dotted = _encode(".grams")[0]
    for text, allowed in (("x = parcel", False), ("x = 'parcel", True), ("x = ''", False), ("x = f'{", False)):
        assert bool(strict.allowed(state_of(strict, HEAD + text))[dotted]) == allowed
        assert lax.allowed(state_of(lax, HEAD + text))[dotted]
    assert not strict.allowed(state_of(strict, HEAD + "x = 'a"))[_encode(' ".town')[0]]


def test_a_name_that_is_wrong_already_is_let_go_on() -> None:
    constraint = compiled(strict_dot=False)
    assert constraint.idle(state_of(constraint, HEAD + "parcel.zzz"))
    assert not constraint.idle(state_of(constraint, HEAD + "parcel.gra"))


def dotted(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("latin-1")


@pytest.mark.parametrize(
    "drafter",
    [None, PromptLookup(length=6), DraftModel(TARGET, length=6)],
    ids=["plain", "prompt-lookup", "draft-model"],
)
@pytest.mark.parametrize("rule", [Coupled(), AWRS()], ids=lambda rule: type(rule).__name__)
def test_the_analyser_is_asked_beside_the_loop(drafter, rule, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    go = Event()

    def names(monitor: Monitor, code: str) -> list[str]:
        threads.append(current_thread().name)
        assert go.wait(60)
        return ["grams", "total_", "town"]

    monkeypatch.setattr(Monitor, "names", names)
    constraint = Monitor(str(HERE), strict_dot=False).compile(VOCABULARY)
    favoured = LogitBias({VOCABULARY.pieces.index(b"."): 12.0})
    sampler = Sampler((Constrained(constraint), favoured, Temperature(1.0)))
    prompt = list((HEAD + "parcel.grams + depot.town + parcel.").encode())
    settings = {"sampler": sampler, "acceptance_rule": rule, "drafter": drafter, "max_new_tokens": 24}
    engine = Engine(TARGET)
    seq = engine.submit(Request(prompt, seed=3, **settings))
    other = engine.submit(Request([1, 2, 3], max_new_tokens=8))
    engine.run([other])
    assert seq.error is None and len(other.generated) == 8 and not seq.generated
    go.set()
    engine.run([seq])
    assert len(threads) > 2 and set(threads) == {"blocking"}
    plain = decode(TARGET, [prompt], seeds=(3,), sampler=sampler, max_new_tokens=24)[0]
    assert seq.generated == plain.generated and dotted(seq.generated).count(".") > 2


def test_searches_ask_the_analyser_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def names(monitor: Monitor, code: str) -> list[str]:
        threads.append(current_thread().name)
        return ["grams", "town"]

    monkeypatch.setattr(Monitor, "names", names)
    sampler = Sampler((Constrained(Monitor(str(HERE)).compile(VOCABULARY)), Temperature(0.0)))
    request = Request(list((HEAD + "parcel.").encode()), sampler=sampler, max_new_tokens=6)
    (found, *_) = Beam(width=2).run(Engine(TARGET), request)
    assert dotted(found.generated)[:2] in ("gr", "to") and set(threads) == {"blocking"}


@pytest.mark.integration
def test_what_takes_too_long_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Monitor, "names", ASKED)
    assert "town" in compiled().monitor.names(HEAD + "depot.")
    process = analyser().workers.idle[0].popen
    os.kill(process.pid, signal.SIGSTOP)
    assert Monitor(str(HERE), seconds=0.1).names(HEAD + "parcel.") is None
    assert process.returncode is not None
    assert "grams" in compiled().monitor.names(HEAD + "parcel.")


def test_the_project_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("import pathlib\npathlib.Path('ran').touch()\nvalue = 1\n")
    (tmp_path / "sitecustomize.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monitor = Monitor(str(tmp_path), seconds=120.0)
    assert "value" in monitor.names("import trap\ntrap.")
    assert not list(tmp_path.glob("ran")) and not Path("ran").exists()


def test_an_analyser_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConstraintError, match="does not start"):
        Analyser().ask({}, 60.0)


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    for settings, message in (
        ({"project": str(tmp_path / "no")}, "there is no folder"),
        ({"policy": "firm"}, "hard, soft or off_if_any"),
        ({"bonus": 0.0}, "bonus of monitor must be"),
        ({"prefix": "x" * (1 << 20 | 1)}, "the limit"),
    ):
        with pytest.raises((SettingsError, ConstraintError), match=message):
            Monitor(**settings)


def test_the_embedded_model_writes_the_same_with_and_without_drafts(smollm2_int8) -> None:
    monitor = Monitor(str(HERE), seconds=120.0)
    for text in ("return parcel.", "if depot.is_crowded():\n        depot."):
        plain, fast = (
            smollm2_int8.generate(
                HEAD + text,
                apply_chat_template=False,
                constraint=monitor,
                drafter=drafter,
                max_new_tokens=10,
                stop="\n\n",
            )
            for drafter in (None, "prompt-lookup")
        )
        assert plain.tokens == fast.tokens
        name = re.match(r"\w+", plain.text)
        assert name is not None and name[0] in monitor.names(HEAD + text)


def test_the_analyser_is_one_for_all() -> None:
    assert analyser() is analyser()
