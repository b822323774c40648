"""What is gained where a short text is drafted at once, by place, and what learning to count and order adds to it.

    python benchmarks/train.py seq2seq normalise --steps 1200 --out normalise
    decodery train cppd normalise -m normalise --texts 4000 --steps 500 --batch 16 --out slots
    decodery train cppd normalise -m normalise --texts 4000 --steps 500 --batch 16 --aside 0 --out plainer
    python benchmarks/draft/cppd.py normalise slots plainer

Writes `benchmarks/results/draft-cppd.json`: on sources nobody has trained on, greedy: passes of the decoder for a text
and tokens for a pass, plain and with each of the slots, whose texts must be the same; of how many texts the slots alone
would have said all as the model writes it; and how many of the texts are right.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import decodery as dc
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.models.trained.slots import Slots
from decodery.training.cppd import states_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from decodery_benchmarks.results import write_result
from decodery_benchmarks.training.transductions import sources, transduction

OUT = Path(__file__).parents[1] / "results" / "draft-cppd.json"


@click.command()
@click.argument("model")
@click.argument("folders", nargs=-1, required=True)
@click.option("--texts", default=100, show_default=True)
def main(model: str, folders: tuple[str, ...], texts: int) -> None:
    """Measure the slots in FOLDERS as drafters of MODEL, a folder of `python benchmarks/train.py seq2seq normalise`."""
    torch.set_num_threads(1)
    lm, kind = dc.load(model, dtype="float32"), transduction("normalise")
    assert isinstance(lm.model, EncoderDecoder)
    held = list(dict.fromkeys(islice(sources(kind, "test"), 2 * texts)))[:texts]
    wanted = [kind.write(each) for each in held]

    def run(drafter: str | None) -> list[Any]:
        return lm.generate(held, drafter=drafter, temperature=0, max_new_tokens=26)

    plain = run(None)
    rows = {"plain": figures(plain) | {"right": share([each.text for each in plain], wanted)}}
    click.echo(json.dumps(rows["plain"]))
    for folder in folders:
        drafted = run(f"cppd:slots={folder}")
        assert [each.tokens for each in drafted] == [each.tokens for each in plain]
        slots, said = Slots.load(folder), list[str]()
        for each in held:
            logits = slots.say(*states_of(lm.model, [lm.encode(each)])).logits[0]
            found = slots.tokens[logits.argmax(dim=-1)][: slots.end(logits)].tolist()
            said.append(lm.tokenizer.decode([token for token in found if token not in slots.ends]))
        rows[Path(folder).name] = figures(drafted) | {
            "aside": slots.facts["recipe"]["aside"],
            "seed": slots.facts["recipe"]["seed"],
            "alone as the model": share(said, [each.text for each in plain]),
            "alone right": share(said, wanted),
            "right": share([each.text for each in drafted], wanted),
        }
        click.echo(json.dumps({folder: rows[Path(folder).name]}))
    command = " ".join(["python benchmarks/draft/cppd.py", *(Path(each).name for each in (model, *folders))])
    made = {"command": command, "texts": len(held), "rows": rows}
    write_result(OUT, made)


def figures(outputs: list[Any]) -> dict[str, float]:
    passes = sum(each.trace.ledger.passes["model"] for each in outputs)
    tokens = sum(each.trace.ledger.tokens for each in outputs)
    return {"passes per text": round(passes / len(outputs), 2), "tokens per pass": round(tokens / passes, 2)}


def share(found: list[str], wanted: list[str]) -> float:
    return round(float(np.mean([a == b for a, b in zip(found, wanted, strict=True)])), 3)


if __name__ == "__main__":
    main()
