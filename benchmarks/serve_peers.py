"""This package's server beside other ones on the same model, prompts and arrivals.

    python benchmarks/serve_peers.py --data ../shared/data
    python benchmarks/serve_peers.py --workload built-in --prompts 8 --max-new-tokens 48 --concurrency 1,4,16 --rates 9

makes an environment for each peer where there is none (with pip, under the cache folder), starts one server after the
other, raises the load on each until it breaks, and writes benchmarks/results/serve-peers.json and, under --out, the
same with a page and a table. After a Ctrl-C the same command goes on; `--again` begins anew. Needs a quiet machine, and
about half an hour.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

import torch

from decodery.bench.load.job import LoadJob
from decodery.bench.load.settings import LoadSettings
from decodery.bench.load.show import show
from decodery.bench.load.target import Target, own
from decodery.bench.report import table
from decodery.bench.result import dump, read, require_load
from decodery.bench.terminal import progress_bar, screen
from decodery.cli.decode import stop_on_interrupt
from decodery.models.loaders.store import home
from decodery_benchmarks.peers.base import checkpoint
from decodery_benchmarks.peers.llama_cpp import requantize

HERE = Path(__file__).parent
PACKAGES = {
    "llama.cpp": ["xllamacpp"],
    "openvino": ["openvino-genai", "starlette", "uvicorn"],
}
CONTEXT, SLOTS = 16384, 16


def python_of(name: str) -> str:
    """The interpreter of a peer's environment, made where there is none."""
    folder = home() / "peers" / "environments" / name
    done = folder / "installed"
    python = folder / "bin" / "python"
    if not done.exists():
        print(f"installing {name} into {folder} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True)
        done.touch()
    return str(python)


def target(name: str, model: str, pythons: dict[str, str]) -> Target:
    if name == "decodery":
        return own(model, "auto")
    path, threads = checkpoint(model), str(torch.get_num_threads())
    if name == "openvino":
        python = pythons.get(name) or python_of(name)
        script = str(HERE / "servers" / "openvino_genai_server.py")
        return Target(name, command=(python, script, str(path), "{port}"))
    python = pythons.get("llama.cpp") or python_of("llama.cpp")
    if name == "llama.cpp-q8":
        path = requantize(path, "Q8_0")
    script = str(HERE / "servers" / "xllamacpp_server.py")
    return Target(name, command=(python, script, str(path), "{port}", str(CONTEXT), str(SLOTS), threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="an embedded model or a .gguf file")
    parser.add_argument("--servers", default="decodery,llama.cpp,openvino", help="also llama.cpp-q8")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="of a peer's environment")
    parser.add_argument("--data", default=os.environ.get("DECODERY_DATA"))
    parser.add_argument("--workload", default="spec-bench")
    parser.add_argument("--trace", help="arrivals as recorded, in place of a workload and clients that wait")
    parser.add_argument("--prompts", type=int, help="of a stage; 40, or all of a trace")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--rates", default="", help="raised until the server breaks if there are none")
    parser.add_argument("--out", type=Path, default=Path("runs/serve-peers"), help="where it is while it is measured")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "serve-peers.json", help="where it ends")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    settings = LoadSettings(
        workload=options.workload,
        data=options.data,
        prompts=options.prompts,
        max_new_tokens=options.max_new_tokens,
        trace=options.trace,
        concurrency=() if options.trace else tuple(int(each) for each in options.concurrency.split(",") if each),
        rates=tuple(float(each) for each in options.rates.split(",") if each),
    )
    earlier = None
    if (options.out / "results.json").exists() and not options.again:
        earlier = require_load(read(options.out))
        if LoadSettings.from_dict(earlier["settings"]) != settings:
            sys.exit(f"{options.out} holds a measurement with other settings: give --again or another --out")
    pythons = dict(each.split("=", 1) for each in options.python)
    targets = [target(name, options.model, pythons) for name in options.servers.split(",")]
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = LoadJob(settings, targets, {"name": options.model}, options.out, earlier).run(report, stopped)
    show(result, screen())
    if not result["complete"]:
        sys.exit(130)
    (options.out / "table.md").write_text(table(result) + "\n", encoding="utf-8")
    options.json.write_text(dump(result), encoding="utf-8")


if __name__ == "__main__":
    main()
