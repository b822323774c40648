"""Settings of methods that untrusted requests may not give: files, programs and endless work."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from decodery.core.catalogue import catalogue
from decodery.core.errors import NotTrusted
from decodery.core.method_spec import free_text, from_network
from decodery.core.registry import methods, resolve
from decodery.search.steps import Stepped

STEPPED = [each.name for each in methods("search") if issubclass(each.cls, Stepped)]
LOCAL = {
    *(("search", name, files) for name in ("drag", "iter-drag") for files in ("documents", "examples")),
    ("search", "cheatsheet", "file"),
    # Asked after every token, so a slow one would hold up others.
    *(("search", name, "step_pattern") for name in STEPPED),
    *(("logits-source", "adapter", "file"), ("compression", "s2ft", "file")),
    ("logits-processor", "no-citation", "texts"),
    ("diffusion", "learn2pd", "filter"),
    ("search", "compute-optimal", "table"),
    *(("search", "edge", file) for file in ("adapter", "switch")),
    *(("drafter", name, "datastore") for name in ("aded", "rasd", "rest", "suffix-automaton")),
    *(
        ("drafter", name, "model")
        for name in (
            "auto",
            "deer",
            "draft-model",
            "easyspec",
            "hmm",
            "nested",
            "pearl",
            "rapid",
            "tli",
            "universal-draft",
        )
    ),
    *(
        ("drafter", "auto", "warm"),
        ("drafter", "auto", "keep"),
        ("drafter", "auto", "head"),
        ("drafter", "draft-model", "transform"),
        ("drafter", "easyspec", "transform"),
        ("drafter", "pearl", "transform"),
        ("drafter", "lexical-unit", "units"),
        ("acceptance-rule", "judge", "head"),
    ),
    *(("drafter", name, "head") for name in ("chimera", "clover", "eagle", "eagle-3", "falcon", "fspad", "hydra")),
    *(("drafter", name, "head") for name in ("dflash", "dspark", "mtp", "p-eagle")),
    *(("drafter", name, "head") for name in ("kangaroo", "longspec", "medusa", "msd")),
    ("drafter", "cppd", "slots"),
    ("drafter", "discrete-key-value", "keys"),
    *(("drafter", "swift", "skip"), ("logits-source", "calm", "calibration"), ("logits-source", "sec", "heads")),
    *(("logits-source", "ftp", "routers"), ("logits-source", "hamburger", "micro")),
    *(("cache-policy", "double-sparsity", "calibration"), ("diffusion", "learn2pd", "filter")),
    *(("cache-policy", "lserve", "gates"), ("cache-policy", "write-gate", "gate")),
    *(("cache-policy", name, "trained") for name in ("coprocessor", "meta-soft")),
    ("diffusion", "phase-handoff", "model"),
    *(("monitor", name, "probe") for name in ("factcheckmate", "program-probe", "sequential", "truthprint")),
    *(("monitor", "factcheckmate", "shift"), ("monitor", "los", "head"), ("monitor", "neurofeedback", "axis")),
    *(("monitor", "feature", name) for name in ("sae", "site")),
    *(("monitor", "codebook", "codebooks"), ("monitor", "sae", "codes")),
    *(("drafter", "ppd", "ppd"), ("drafter", "hidden-transfer", "transfer"), ("drafter", "cppd", "slots")),
    ("logits-source", "entropy-adaptive", "small"),
    *(
        ("logits-source", "partial-attention", "weights"),
        ("logits-source", "sven", "prefix"),
        ("logits-source", "transfer-q", "baseline"),
    ),
    *(("draft-length", "specdec++", "head"), ("scorer", "value-head", "head")),
    *(("scorer", "process-reward", "head"), ("scorer", "reward-model", "model")),
    *(("scorer", "program-tests", name) for name in ("file", "head", "setup", "tests")),
    *(("constraint", "monitor", name) for name in ("project", "path", "prefix")),
    *(("search", name, "model") for name in ("arbitrage", "pairwise", "phase-handoff", "spec-reason")),
    ("diffusion", "phase-handoff", "model"),
    ("search", "arbitrage", "router"),
}
"""Settings that are text and may be a path, a model or a program: no stranger gives them."""


def test_every_setting_that_takes_any_text_is_known_to_be_harmless_or_refused_to_untrusted_requests() -> None:
    found = set()
    for method in methods():
        kinds = typing.get_type_hints(method.cls)
        taking = {each.name for each in dataclasses.fields(method.cls) if each.init and free_text(kinds[each.name])}
        assert set(method.texts) <= taking, method.name
        found |= {(method.family, method.name, name) for name in taking - set(method.texts)}
    own = {each for each in found if method_is_own(each)}
    assert own == LOCAL


def method_is_own(setting: tuple[str, str, str]) -> bool:
    """Whether a setting is of a method of this package; other tests register some."""
    return setting[1] in catalogue(setting[0])


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        *(("drafter", "rest:datastore=/etc/passwd"), ("drafter", "forced:drafter=rest(datastore=/etc/passwd)")),
        *(
            ("drafter", "cascade:drafters=prompt-lookup/rest(datastore=a)"),
            ("drafter", "auto:warm=/x"),
            ("drafter", "auto:keep=/x"),
        ),
        *(("drafter", "draft-model:model=some/model"), ("constraint", "monitor"), ("search", "pg-td:tests=x")),
        *(("search", "beam:width=100000"), ("drafter", "auto:orders=2000/3")),
        ("search", "archon:layers=generator(n=2,model=http://localhost:1)/ranker"),
    ],
)
def test_untrusted_requests_name_no_files_and_nothing_endless(family: str, spec: str) -> None:
    with from_network(), pytest.raises(NotTrusted, match="request"):
        resolve(family, spec)
    with from_network():
        assert resolve("drafter", "draft-model:tree_policy=eagle-2(nodes=32)") and resolve(
            "constraint", 'regex:pattern="a+"'
        )
        assert resolve("drafter", "auto") and resolve("search", "beam:width=4")
