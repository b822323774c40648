"""What every kind of `decodery train` comes to at its smallest size, with what stands beside its figure.

    python benchmarks/trained_kinds.py --out benchmarks/results/trained-kinds.json
    python benchmarks/trained_kinds.py --out benchmarks/results/trained-kinds.json --kinds direction,sae
    python benchmarks/trained_kinds.py --out benchmarks/results/trained-kinds.json --limit-hours 1

Each kind is trained by its command, with the settings below, on built-in data or this repository's pages. A row holds
what the command printed, and the hours; those of the processor are comparable with OMP_NUM_THREADS=1. Rows that a
result file has already are kept where the model and their arguments are the same; a kind that was stopped goes on from
its folder in --work. A kind that did not end within --kind-hours, or that failed, says so in its row.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from decodery.cli.main import main as decodery
from decodery.cli.train import index
from decodery_benchmarks.results import read_result, write_result
from decodery_benchmarks.trained_data import LISTS, written_files

OWN = "--texts 240 --max-new-tokens 40"
"""The texts that the model writes, once for all kinds that learn from them; six of them are tested."""
FEW = "--texts 40 --max-new-tokens 32"
PIECES = "{text} --length 64 --texts 96"
CACHE = f"{PIECES} --steps 12"
TASKS = f"--tasks {','.join(LISTS)}"
DIFFUSION = "{work}/diffusion"
KINDS = {
    "direction": "--site resid_post.20",
    "value": "{rewarded} --no-chat-template",
    "diffusion": f"--size xs {TASKS} --steps 3000",
    "ngram-cache": OWN,
    "ngrams": OWN,
    "datastore": "{text}",
    "draft": f"{OWN} --epochs 1",
    "head": f"{OWN} --kind eagle-3 --epochs 1 --outputs 4096",
    "hmm": f"{OWN} --states 32 --tokens 1024 --iterations 5",
    "swift": f"{FEW} --proposals 30 --bayes 10 --read 4",
    "del": FEW,
    "acceptance": f"{OWN} --draft smollm2-draft --epochs 1",
    "codebook": "{text} --length 64 --texts 30 --codes 64 --steps 20 --seeds 3",
    "autoencoder": "{text} --length 64 --texts 60 --features 512 --k 16 --steps 200 --site resid_post.15",
    "sae": "--count 120 --max-new-tokens 4 --steps 100 --features 64",
    "probe": "--rows prompt --count 240 --max-new-tokens 12 --site resid_post.20",
    "los": "--count 240 --max-new-tokens 12",
    "sequential": "--count 240 --site resid_post.20",
    "threshold": "{labelled} --monitor confidence:measure=worst --rate 0.2",
    "kv-bottleneck": f"{PIECES} --codebooks 8 --keys 64 --rank 16 --epochs 1",
    "kv double-sparsity": PIECES,
    "text-prm": "{rewarded} --no-chat-template --steps 100",
    "judge": "{questions} --steps 100",
    "adadec-thresholds": "{solutions}",
    "calm": "--texts 32 --max-new-tokens 16 --delta 0.4",
    "orpo": "{preferences} --steps 6 --batch 2 --rank 4",
    "dscd": f"{DIFFUSION} {TASKS} --steps 60",
    "r2": f"{DIFFUSION} {TASKS} --trajectories 100 --steps 60",
    "learn2pd": f"{{lists}} -m {DIFFUSION} --no-chat-template --block 6 --max-new-tokens 6 --epochs 300",
    "sec": "{text} --length 64 --outputs 1024 --epochs 0.2",
    "lora": "{text} --length 64 --steps 60 --rank 4",
    "s2ft": "{text} --length 64 --steps 60",
    "ppd": f"{OWN} --steps 10 --places 8",
    "hidden-transfer": f"{OWN} --steps 10 --places 8",
    "lexical-units": f"{OWN} --steps 10 --places 8",
    "nested": f"{OWN} --epochs 0.5 --exits 1/2",
    "deer": f"{OWN} --epochs 0.4 --refining 0.1",
    "kv lserve": CACHE,
    "kv write-gate": CACHE,
    "kv coprocessor": CACHE,
    "kv meta-soft": CACHE,
    "merges": f"{PIECES} --steps 12 --width 128",
    "partial": "{sources} --steps 8 --batch 2",
    "sven": "--epochs 0.2",
    "bitnet": f"{OWN} --steps 8 --batch 2",
    "nm-sparsity": f"{OWN} --steps 8 --batch 2",
    "lq-lora": f"{OWN} --steps 8 --batch 2",
    "hyperfit": "{text} --length 48 --texts 16 --epochs 6 --lr 1e-4 --written 64",
    "hamburger": f"{OWN} --epochs 0.4 --base-lr 0 --batch 4",
    "ftp": f"{OWN} --population 4 --generations 2 --read 3 --length 48 --steps 6",
    "to-diffusion": "--tasks copy,reverse --steps 8 --batch 4",
    "grpo": "{problems} --group 4 --batch 1 --steps 4 --max-new-tokens 16",
    "router": "{prompts} --scorer value-head(head={work}/value) --step-tokens 12 --max-new-tokens 36",
    "step-labels": "{exercises} --max-new-tokens 96",
}
"""By kind: the arguments after `decodery train KIND`."""
ABSENT = {"cppd": "it needs an encoder-decoder model, and none is shipped"}
"""Kinds that are not trained here, and why."""
WITHOUT_OUTPUT = ("adadec-thresholds", "threshold")
"""Kinds that print what they find, with these arguments."""
KEPT = ("diffusion", "value")
"""What others are trained with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--work", type=Path, default=Path("runs/trained-kinds"))
    parser.add_argument("--kind-hours", type=float, default=0.25)
    parser.add_argument("--limit-hours", type=float, default=24.0)
    given = parser.parse_args()
    wanted, end = given.kinds.split(","), time.monotonic() + 3600 * given.limit_hours
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"no settings for {', '.join(sorted(unknown))}: kinds are {', '.join(KINDS)}")
    settings = {"model": given.model, "hours of a kind at most": given.kind_hours}
    known = read_result(given.out) if given.out.is_file() else None
    rows = dict(known["rows"]) if known is not None and known["settings"] == settings else {}
    rows |= {kind: {"arguments": "", "not run": why} for kind, why in ABSENT.items()}
    files = written_files(given.work)
    for kind in wanted:
        row = rows.get(kind, {})
        if row.get("arguments") == KINDS[kind] and "printed" in row:
            continue
        if time.monotonic() > end:
            print("the hours are over: the same command goes on", flush=True)
            break
        rows[kind] = {"arguments": KINDS[kind]} | trained(kind, given.model, files, given.work, given.kind_hours)
        shown = "python benchmarks/trained_kinds.py --out benchmarks/results/trained-kinds.json"
        write_result(given.out, {"command": shown, "settings": settings, "rows": rows, "summary": {}})
        print(json.dumps({kind: rows[kind]}, indent=1), flush=True)


def trained(kind: str, model: str, files: dict[str, str], work: Path, limit: float) -> dict[str, Any]:
    """The row of a kind, which goes on from its folder.

    Args:
        kind: Its command.
        model: The model, unless its arguments name one.
        files: What it reads.
        work: Where folders lie.
        limit: After so many hours it is stopped.
    """
    out, spent = work / kind.replace(" ", "-"), work / f"{kind.replace(' ', '-')}.hours.json"
    texts, own = work / "texts", KINDS[kind].startswith(OWN)
    if own and texts.is_dir() and not out.exists():
        shutil.copytree(texts, out / "text" / "written")
    arguments = shlex.split(KINDS[kind].format(**files, work=work))
    command = ["decodery", "train", *kind.split(), *arguments, "--limit-hours", str(limit)]
    command += [] if "-m" in arguments or not index()[f"train {kind}"]["model"] else ["-m", model]
    command += [] if kind in WITHOUT_OUTPUT else ["--out", str(out)]
    hours = json.loads(spent.read_text()) if spent.is_file() else [0.0, 0.0]
    begin = time.monotonic()
    code, said, errors, used = _run(command)
    hours = [hours[0] + (time.monotonic() - begin) / 3600, hours[1] + used / 3600]
    spent.write_text(json.dumps(hours))
    row = {"hours": round(hours[0], 4), "processor hours": round(hours[1], 4)}
    if own and not texts.is_dir() and (out / "text" / "written").is_dir():
        shutil.copytree(out / "text" / "written", texts)
    if code == 130:
        return row | {"not run": f"it did not end within {limit:g} hours on the shared machine"}
    if code:
        lines = [line for line in errors.splitlines() if line.strip()]
        return row | {"not run": lines[-1] if lines else f"it ended with code {code}"}
    spent.unlink()
    if kind not in KEPT and out.is_dir():
        shutil.rmtree(out)
    # The same file on every machine.
    said = said.replace(str(work), "{work}")
    return row | {"printed": json.JSONDecoder().raw_decode(said)[0] if said.startswith("{") else {}}


def _run(command: list[str]) -> tuple[int, str, str, float]:
    """A command in a copy of this process: its status, output, errors and seconds of processor time.

    A copy has everything imported, which takes longer than the training of many kinds.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv = command
            code = 1
            try:
                decodery()
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status, used = os.wait4(pid, 0)
        output.seek(0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), output.read(), errors.read(), used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
