"""Part A: what the GPU path computes is what the invariants of `decodery.testing` and the CPU say it must be."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from kit import Kit, NotRunError
from ready import ROOT
from shapes import moved, pools_of_pytorch, tiny, without_static

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.torch.packed_linear import PackedLinear
from decodery.sampling import Sampler
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.compressed_cache import CompressedCache
from decodery.testing import (
    Garbage,
    Oracle,
    check_batch,
    check_cache,
    check_identical,
    check_state,
    decode,
    tiny_transformer,
    to_int8,
)
from decodery.testing.laws import first_difference, margin

PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3]
NUCLEUS = Sampler.from_settings(temperature=0.7, top_p=0.9)
CLOSE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""By dtype: how far logits may be from the float64 ones of the CPU, as the ratio of their norms."""
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""In nats: where texts may part, because passes of several rows round otherwise."""
TESTS = {name: f"models/test_{name}.py" for name in ("graphs", "paged_rows", "packed_linear", "fused")}
TESTS["fixed_heads"] = "speculative/heads/test_fixed_heads.py"
"""Files whose tests run on the device."""
TREES = (
    "eagle-2:nodes=40,width=12,depth=4",
    "rsd-c:branching=3/2/1",
    "rsd-s:width=4,depth=4",
    "specinfer:expansion=3/2/1",
)
"""What models and heads read ahead on the device: the most likely nodes, and those that are drawn in several ways."""
LATE = ("quest:budget=16", "snapkv:budget=8", "pyramid-kv:budget=8")
"""Cache policies that begin after the prompt, under which the model drafts for itself."""
_HEADLESS = "auto without a head"
_FEW = (_HEADLESS, "eagle")
Said = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Correctness:
    """What part A needs. load: the embedded model in a dtype on a device; it raises NotRunError where there is none.

    few: whether fewer texts and drafters say enough.
    """

    kit: Kit
    device: torch.device
    load: Callable[[str, torch.device], Any]
    few: bool
    keeps: float

    def run(self) -> None:
        """Part A, in the order of what its checks say of the graphs."""
        self._check("replays equal the ordinary pass", self.replays)
        self._check("trees", self.trees)
        self._check("forks", self.forks)
        self._check("batches of 16", self.batches)
        self._check("seeds, tiny model, float32", self.seeds_tiny)
        self._check("seeds, embedded model, float32", self.seeds_embedded, needs=10)
        for dtype in CLOSE:
            self._check(f"dtype {dtype}", lambda dtype=dtype: self.dtype(dtype))
        for precision in ("int8", "int4"):
            self._check(f"embedded model, {precision}", lambda precision=precision: self.quantized(precision), needs=10)
        self._check("int8 layers, tiny model", self.int8)
        for held in ("int8", "float8_e4m3fn"):
            self._check(f"keys and values in {held}", lambda held=held: self.bytes(held))
        self._check("steps from embeddings to tokens", self.steps)

    def rest(self) -> None:
        """Part D: all drafters, and the tests, which take long and say more of the same."""
        from methods import DRAFTERS, KINDS

        # One of each kind first.
        for name in dict.fromkeys([_HEADLESS, *KINDS, *DRAFTERS]):
            self._check(f"drafter {name}", lambda name=name: self.drafter(name), part="D")
        for name in ("draft-model", "eagle-3"):
            for tree in TREES:
                self._check(f"drafter {name}, {tree}", lambda name=name, tree=tree: self.drafter(name, tree), part="D")
        for name in LATE:
            self._check(f"drafter under {name}", lambda name=name: self.drafter(name, TREES[0]), part="D")
        for name in [*TESTS][:1] if self.few else TESTS:
            self._check(f"tests: {name}", lambda name=name: self.tests(name), needs=15, part="D")

    def _check(self, name: str, body: Callable[[], Said], needs: float = 3.0, part: str = "A") -> None:
        # A processor takes its time.
        self.kit.check(part, name, body, needs=needs, most=300.0 if self.few else 60.0, keeps=self.keeps)

    def tests(self, name: str) -> Said:
        """A file of tests that need CUDA, in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "tests.xml"
            command = [sys.executable, "-m", "pytest", "-m", "cuda", f"tests/unit/{TESTS[name]}"]
            # What compiles for other cards runs anywhere.
            command += ["-o", "addopts=", "-q", "-k", "not for_a_card"]
            command += ["--import-mode=importlib", "-p", "no:cacheprovider", f"--junitxml={report}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
            if not report.is_file():
                lines = (done.stderr + done.stdout).strip().splitlines()
                raise NotRunError(f"pytest ended with {done.returncode}: {lines[-1] if lines else 'it said nothing'}")
            cases = list(ElementTree.parse(report).getroot().iter("testcase"))
        wrong = [
            case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None
        ]
        skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
        if wrong:
            self.kit.note(done.stdout[-6000:])
            raise AssertionError(f"{len(wrong)} of {len(cases)} fail: {', '.join(map(str, wrong))}")
        if len(skipped) == len(cases):
            reason = skipped[0].get("message") if skipped and skipped[0] is not None else "there are none"
            raise NotRunError(f"all {len(cases)} were skipped: {reason}")
        return f"{len(cases) - len(skipped)} of {len(cases)} pass, {len(skipped)} skipped", {"tests": len(cases)}

    def replays(self) -> Said:
        """Chains at fixed shapes beside the ordinary pass, and that there were passes at fixed shapes at all."""
        with pools_of_pytorch():
            return self._replayed()

    @torch.no_grad()
    def _replayed(self) -> Said:
        model = tiny(self.device)
        ordinary, worst = without_static(model), 0.0
        caches = model.new_cache(), ordinary.new_cache()
        for first in range(0, 24, 3):
            rows = [
                each.forward(Batch([Segment.chunk(TEXT[first : first + 3], cache)])).logits
                for each, cache in zip((model, ordinary), caches, strict=True)
            ]
            for cache in caches:
                cache.keep(range(3))
            worst = max(worst, float((rows[0] - rows[1]).abs().max()))
        if model.static is None:
            raise NotRunError("passes at fixed shapes are switched off")
        if not model.static.shapes:
            raise AssertionError("no pass ran at a fixed shape")
        if not worst <= 1e-10:
            raise AssertionError(f"logits differ by {worst:.1e}")
        how = "replayed graphs" if self.device.type == "cuda" else "the same function without graphs"
        return f"logits differ by {worst:.0e} at most ({how})", {"worst": worst}

    def trees(self) -> Said:
        """Random trees, and trees with the true text on a random path."""
        model = tiny(self.device)
        (plain,) = decode(model, PROMPTS[:1], max_new_tokens=24)
        oracle = Oracle(tuple(plain.tokens))
        check_identical(model, PROMPTS, drafter=Garbage(nodes=30))
        check_identical(model, PROMPTS[:1], drafter=oracle, max_new_tokens=24)
        worst = max(check_state(model, PROMPTS[:1], drafter=each, max_new_tokens=20) for each in (Garbage(), oracle))
        return f"tokens identical; caches within {worst:.0e} of a fresh prefill", {"worst": worst}

    def forks(self) -> Said:
        """Random programs of trees, cuts, forks and returns on caches, and a text forked while it is written."""
        model = tiny(self.device)
        worst = check_cache(model, programs=2 if self.few else 6)
        engine = Engine(model)
        first = engine.submit(Request(PROMPTS[0], max_new_tokens=20, sampler=NUCLEUS, seed=3, drafter=Garbage()))
        while len(first.generated) < 6:
            engine.step()
        second = engine.fork(first)
        engine.run([first, second])
        if first.generated != second.generated:
            raise AssertionError(f"a fork wrote {second.generated}, the text it was made of {first.generated}")
        return f"caches within {worst:.0e} of fresh ones; a forked text goes on alike", {"worst": worst}

    def batches(self) -> Said:
        """16 texts together, each what it is alone."""
        model = tiny(self.device)
        prompts = [[1 + number, *range(2, 2 + (1 if self.few else 3) * number)] for number in range(8)]
        for drafter in (None, Garbage()):
            check_batch(model, prompts, drafter=drafter, sampler=NUCLEUS, max_new_tokens=4 if self.few else 10)
        return "16 texts are what each is alone, plain and drafted", {}

    def seeds_tiny(self) -> Said:
        """Tokens of some seeds beside the CPU's."""
        models = [tiny(each, torch.float32) for each in (self.device, torch.device("cpu"))]
        return self._seeds(models, PROMPTS, 8, 24)

    def seeds_embedded(self) -> Said:
        """The same of the embedded model."""
        loaded = [self.load("float32", each) for each in (self.device, torch.device("cpu"))]
        lines = ["Name three rivers.", "Write a short poem about rain.", "Why is the sky blue?"]
        prompts = [loaded[0].tokenizer.encode(line) for line in lines[: 1 if self.few else 3]]
        return self._seeds([each.model for each in loaded], prompts, 1 if self.few else 2, 8 if self.few else 32)

    def _seeds(self, models: list[Any], prompts: Sequence[Sequence[int]], seeds: int, tokens: int) -> Said:
        texts, same, ties = 0, 0, []
        for sampler in (Sampler.from_settings(), NUCLEUS):
            settings = {"sampler": sampler, "seeds": tuple(range(seeds)), "max_new_tokens": tokens}
            runs = [decode(model, prompts, **settings) for model in models]
            for here, there in zip(*runs, strict=True):
                texts += 1
                if here.generated == there.generated:
                    same += 1
                    continue
                at = first_difference(there.generated, here.generated)
                ties.append(gap := margin(models[1], there, here, at))
                if not gap < NEAR_TIE["float32"]:
                    raise AssertionError(
                        f"seed {here.seed} parts from the CPU at token {at}, which it preferred by {gap:.1e}"
                    )
        return f"{same} of {texts} texts are the CPU's, {len(ties)} part at a near-tie", {"texts": texts, "same": same}

    @torch.no_grad()
    def dtype(self, name: str) -> Said:
        """Logits beside the float64 ones of the CPU, and texts with drafts beside texts without."""
        dtype = getattr(torch, name)
        reference, model = tiny(torch.device("cpu"), torch.float64, 4), tiny(self.device, dtype, 4)
        wanted, found = (
            each.forward(Batch([Segment.chunk(TEXT, each.new_cache())])).logits.double().cpu()
            for each in (reference, model)
        )
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= CLOSE[name]:
            raise AssertionError(f"logits are {error:.1e} away from float64's, and may be {CLOSE[name]:.0e}")
        excuses = {} if name == "float64" else {"near_tie": NEAR_TIE[name], "excuses": 2}
        check_identical(model, PROMPTS, drafter="prompt-lookup:length=5", tested="drafted", **excuses)
        return f"logits within {error:.0e} of float64's on the CPU; drafted texts identical", {"error": error}

    @torch.no_grad()
    def quantized(self, precision: str) -> Said:
        """The embedded model with integer weights: its tokens beside the CPU's, or the sentence that refuses it."""
        loaded = [self.load(precision, each) for each in (self.device, torch.device("cpu"))]
        prompt = loaded[0].tokenizer.encode("Name three rivers.")
        rows = [
            each.model.forward(Batch([Segment.chunk(prompt, each.model.new_cache())])).logits.double().cpu()
            for each in loaded
        ]
        error = float((rows[0] - rows[1]).norm() / rows[1].norm())
        if not error <= 5e-2:
            raise AssertionError(f"logits are {error:.1e} away from the CPU's")
        packed = isinstance(loaded[0].model.weights.layers[0].qkv, PackedLinear)
        how = "packed on the device" if packed else "as on the CPU"
        return f"{how}; logits within {error:.0e} of the CPU's", {"error": error, "packed": packed}

    def int8(self) -> Said:
        """Layers in int8 are exact row by row."""
        base = to_int8(tiny_transformer(0))
        model = moved(base, self.device)
        check_identical(model, PROMPTS, drafter=Garbage(), seeds=(0,))
        here, there = (decode(each, PROMPTS, max_new_tokens=16) for each in (model, base))
        same = sum(one.generated == other.generated for one, other in zip(here, there, strict=True))
        return f"drafted texts identical; {same} of {len(here)} texts are the CPU's", {"same": same}

    def bytes(self, held: str) -> Said:
        """Keys and values in bytes: texts with drafts beside texts without, and logits beside those of whole ones."""
        with pools_of_pytorch():
            whole, model = (moved(tiny_transformer(0), self.device, torch.float32) for _ in range(2))
            model.narrow_caches(getattr(torch, held))
            check_identical(model, PROMPTS, drafter=Garbage(), seeds=(0,), near_tie=NEAR_TIE["float32"], excuses=2)
            rows = []
            for each in (whole, model):
                cache = each.new_cache()
                with torch.no_grad():
                    each.forward(Batch([Segment.chunk(TEXT[:20], cache)]))
                    cache.keep(range(20))
                    rows.append(each.forward(Batch([Segment.chunk(TEXT[20:], cache)])).logits.double())
        error = float((rows[1] - rows[0]).norm() / rows[0].norm())
        if not error <= 0.15:
            raise AssertionError(f"logits are {error:.1e} away from those over whole keys and values")
        return f"drafted texts identical; logits within {error:.0e} of those over whole ones", {"error": error}

    def steps(self) -> Said:
        """Many texts with and without drafts in one graph a step, and one wait."""
        with pools_of_pytorch():
            model = moved(tiny_transformer(0), self.device, torch.float32)
            engine, sampler = Engine(model), Sampler.from_settings(temperature=0.8, top_k=20)
            texts = [
                engine.submit(Request(prompt, sampler=sampler, seed=seed, drafter=drafter, max_new_tokens=24))
                for seed, prompt in enumerate(PROMPTS * 4)
                for drafter in (None, Garbage(nodes=5))
            ]
            engine.run(texts)
            if model.static is None:
                raise NotRunError("passes at fixed shapes are switched off")
            shapes = [each for each in model.static.shapes if each.choice is not None]
        pairs = list(zip(texts[::2], texts[1::2], strict=True))
        if wrong := sum(plain.generated != drafted.generated for plain, drafted in pairs):
            raise AssertionError(f"{wrong} of {len(pairs)} drafted texts differ from plain ones")
        if not shapes:
            raise AssertionError("no step ran at a fixed shape up to its tokens")
        return f"{len(pairs)} pairs of texts are alike; {len(shapes)} shapes up to tokens", {"shapes": len(shapes)}

    def drafter(self, name: str, tree: str | None = None) -> Said:
        """One drafter or cache policy, with its own trees or others: greedy and sampled texts, batches, caches."""
        from methods import ADAPTIVE, DRAFTERS

        if self.few and name not in _FEW:
            raise NotRunError("at size tiny a few say enough: tests/conformance/test_conformance.py runs all of them")
        model = tiny(self.device)
        if name in LATE:
            made = CompressedCache(name)
        else:
            made = Auto() if name == _HEADLESS else DRAFTERS[name](tiny(self.device, layers=1))
        if tree is not None:
            made = replace(made, length=4, tree_policy=tree)
        runs = [
            *check_identical(model, PROMPTS, drafter=made, tested="drafted", max_new_tokens=24, seeds=(0,)),
            *check_identical(model, PROMPTS, drafter=made, sampler=NUCLEUS, tested="nothing", max_new_tokens=16),
        ]
        check_batch(model, PROMPTS, drafter=made, sampler=NUCLEUS, max_new_tokens=12, tested="nothing")
        if name not in (_HEADLESS, *ADAPTIVE):
            check_state(model, PROMPTS[:1], drafter=made, max_new_tokens=12)
        nodes, accepted = (
            sum(getattr(step, what) for run in runs for step in run.trace.steps) for what in ("nodes", "accepted")
        )
        return f"identical; {accepted} of {nodes} drafts accepted", {"nodes": nodes, "accepted": accepted}
