"""What holding a canvas to a JSON schema takes beside filling it freely, on schemas of JSONSchemaBench.

    DECODERY_THREADS=1 python benchmarks/lave_schemas.py --out benchmarks/results/lave-schemas.json

Schemas come from DECODERY_DATA. SmolLM2 is run as a masked model, whose texts mean nothing: what is measured is the
work per pass. CPU seconds of one thread, the lesser of two runs that take turns; every text that ended must be valid
under its schema.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import jsonschema
import torch

import decodery
from decodery.constraints import JSONSchema
from decodery.core.errors import DecoderyError
from decodery_benchmarks.results import write_result

DATA = Path(os.environ.get("DECODERY_DATA", Path(__file__).parents[2] / "shared" / "data"))
MASKING = "mask=<|im_start|>,shifted=true"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--method", default="static:steps=32")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = (DATA / "jsonschemabench_dev.jsonl").read_text("utf-8").splitlines()
    lm = decodery.load("smollm2", dtype="int8", device="cpu", masking=MASKING)
    rows = []
    for line in lines[:: max(len(lines) // given.count, 1)][: given.count]:
        case = json.loads(line)
        row = {"name": case["name"], **measured(lm, case["schema"], given.method, given.positions)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    ratios = sorted(row["ratio"] for row in rows if "ratio" in row)
    summary = {"schemas": len(ratios), "worst": ratios[-1], "median": ratios[len(ratios) // 2]} if ratios else {}
    settings = {"method": given.method, "positions": given.positions, "masking": MASKING}
    write_result(given.out, {"settings": settings, "rows": rows, "summary": summary})


def measured(lm: decodery.LLM, schema: object, method: str, positions: int) -> dict[str, object]:
    """CPU seconds with the schema and without, and whether the text is valid; or why the schema is refused."""
    seconds: dict[bool, float] = {}
    for _ in range(2):
        for held in (True, False):
            begin = time.process_time()
            try:
                constraint = JSONSchema(schema) if held else None  # type: ignore[arg-type]
                text = lm.diffuse(
                    "Write JSON.", method, max_new_tokens=positions, constraint=constraint, apply_chat_template=False
                )
            except DecoderyError as error:
                return {"refused": str(error)[:200]}
            seconds[held] = min(time.process_time() - begin, seconds.get(held, float("inf")))
            if held and text.finish_reason == "stop":
                jsonschema.validate(json.loads(text.text), schema)
    told = {"held": round(seconds[True], 2), "free": round(seconds[False], 2)}
    return told | {"ratio": round(seconds[True] / seconds[False], 2)}


if __name__ == "__main__":
    main()
