"""What a draft head takes at 1, 4 and 16 texts, with one pass for all texts and with one for each.

    DECODERY_THREADS=1 python benchmarks/draft/shared_passes.py [SPEC ...] [--new 24] [--rounds 3]

SPECs are drafters whose heads can share passes, by default a chain of the one that comes along. Both ways run in turns
in one process and must write the same tokens. Reports calls of the head per step and processor time per token, the
least of the rounds. Writes benchmarks/results/draft-shared-passes.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import thread_time
from typing import Any

from heads import RESULTS, questions

import decodery
from decodery.core.registry import resolve
from decodery.engine.engine import Engine
from decodery.llm.llm import LLM
from decodery.speculative.heads.drafter import HeadDrafter
from decodery.speculative.heads.grown import DraftHead

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result

TEXTS = (1, 4, 16)


def once(
    lm: LLM, prompts: list[list[int]], drafter: HeadDrafter | None, new: int
) -> tuple[list[list[int]], float, int]:
    """The tokens, the processor time and the engine's passes."""
    engine = Engine(lm.model)
    texts = [
        engine.submit(lm.request(prompt, drafter=drafter, max_new_tokens=new, ignore_eos=True)) for prompt in prompts
    ]
    engine.step()
    begin, first = thread_time(), engine.passes
    engine.run(texts)
    return [seq.generated for seq in texts], thread_time() - begin, engine.passes - first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=["eagle-3:tree_policy=none,length=4"])
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lm = decodery.load("smollm2")
    prompts = [lm.encode(each["turns"][0]) for each in questions(max(TEXTS), 0)]
    rows: dict[str, Any] = {}
    for spec in options.specs:
        drafter = resolve("drafter", spec).bind(lm.model)
        assert isinstance(drafter, HeadDrafter)
        kind = drafter.kind
        assert issubclass(kind, DraftHead) and kind.joint
        calls = 0

        def counted(name: str, kind: type[DraftHead] = kind) -> Any:
            whole = getattr(kind, name)

            def call(self: DraftHead, items: Any) -> Any:
                nonlocal calls
                calls += 1
                return whole(self, items)

            return call

        kind.hear_all, kind.grow_all = counted("hear_all"), counted("grow_all")  # type: ignore[method-assign]
        for count in TEXTS:
            least: dict[str, float] = {}
            own: dict[str, Any] = {}
            for _ in range(options.rounds):
                written = []
                for way in ("plain", "each", "shared"):
                    kind.joint, calls = way == "shared", 0
                    tokens, seconds, passes = once(
                        lm, prompts[:count], None if way == "plain" else drafter, options.new
                    )
                    written.append(tokens)
                    least[way] = min(least.get(way, seconds), seconds)
                    own[way] = {"passes": passes, "calls_per_step": round(calls / passes, 2)}
                assert written[0] == written[1] == written[2]
            for way, seconds in least.items():
                own[way]["ms_per_token"] = round(1000 * seconds / (count * options.new), 3)
            rows[f"{spec} at {count}"] = own
            print(spec, count, own, flush=True)
    write_result(
        RESULTS / "draft-shared-passes.json",
        {
            "command": f"python benchmarks/draft/shared_passes.py --new {options.new} --rounds {options.rounds}",
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
