"""How late, and how wrong, texts are that are written while their source arrives.

    python benchmarks/train.py seq2seq reorder --block 2 --steps 4000 --out reorder
    python benchmarks/listening.py reorder

Writes `benchmarks/results/listening.json`: of every way of listening, on sources nobody has trained on, arriving in
chunks of so many tokens: how many tokens of the source had been read, beyond those a token hangs on at least, when it
was committed; the share of texts that differ from the right one, and from greedy decoding of the whole source; and
passes of the decoder, beside those of decoding anew after every chunk.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

import decodery as dc
from decodery.core.registry import resolve
from decodery.extras.simultaneous.base import SimultaneousPolicy, SourceStream, listening
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.step.forward_request import run_sync
from decodery_benchmarks.puzzles.alphabet import encoded
from decodery_benchmarks.results import write_result
from decodery_benchmarks.training.transductions import sources, transduction

WAYS = (
    "re-decode",
    *(f"local-agreement:n={n}" for n in (1, 2, 3)),
    *(f"stability:lookback={n}" for n in (1, 2, 4)),
    *(f"streaming-beam:width=4,lookback={n}" for n in (2, 4)),
    *(f"wait-k:k={k}" for k in (0, 3)),
)
OUT = Path(__file__).parent / "results" / "listening.json"


def listened(
    model: EncoderDecoder, method: SimultaneousPolicy, source: list[int], size: int, ends: tuple[int, ...]
) -> SourceStream:
    stream = SourceStream.of(model, ends)
    for first in range(0, len(source), size):
        run_sync(listening(method, stream, source[first : first + size], first + size >= len(source)))
    return stream


def anew(model: EncoderDecoder, source: list[int], size: int, ends: tuple[int, ...]) -> int:
    """Passes of the decoder where all that has come is decoded from its beginning after every chunk."""
    whole = resolve("simultaneous", "re-decode")
    read = [*range(size, len(source), size), len(source)]
    return sum(len(listened(model, whole, source[:n], n, ends).trace.steps) for n in read)


@click.command()
@click.argument("model")
@click.option("--texts", default=30, show_default=True)
@click.option("--size", "sizes", multiple=True, type=int, default=(2,), show_default=True)
def main(model: str, texts: int, sizes: tuple[int, ...]) -> None:
    """Measure MODEL, a folder of `python benchmarks/train.py seq2seq reorder --block`."""
    lm, kind = dc.load(model), transduction("reorder")
    assert isinstance(lm.model, EncoderDecoder)
    ends = lm.tokenizer.eos_ids
    held = list(islice(sources(kind, "test"), texts))
    offline = [
        listened(lm.model, resolve("simultaneous", "re-decode"), encoded(each), len(each), ends).written
        for each in held
    ]
    found: list[dict[str, Any]] = []
    for size in sizes:
        fresh = sum(anew(lm.model, encoded(each), size, ends) for each in held)
        for way in WAYS:
            streams = [listened(lm.model, resolve("simultaneous", way), encoded(each), size, ends) for each in held]
            chunks = sum(stream.chunks for stream in streams)
            passes = sum(len(stream.trace.steps) for stream in streams)
            lags = [read - place for stream in streams for place, read in enumerate(stream.reads, start=1)]
            right = [stream.written == encoded(kind.write(each)) for stream, each in zip(streams, held, strict=True)]
            same = [stream.written == each for stream, each in zip(streams, offline, strict=True)]
            row = {
                "way": way,
                "chunk": size,
                "lag": round(float(np.mean(lags)), 2),
                "wrong": round(1 - float(np.mean(right)), 3),
                "unlike the whole source's": round(1 - float(np.mean(same)), 3),
                "passes per chunk": round(passes / chunks, 2),
                "passes per chunk, decoded anew": round(fresh / chunks, 2),
            }
            found.append(row)
            click.echo(json.dumps(row))
    wrong = [each != encoded(kind.write(source)) for each, source in zip(offline, held, strict=True)]
    made = {
        "command": f"python benchmarks/listening.py {Path(model).name}",
        "texts": texts,
        "wrong with the whole source": round(float(np.mean(wrong)), 3),
        "rows": found,
    }
    write_result(OUT, made, summary=["wrong with the whole source"])


if __name__ == "__main__":
    main()
