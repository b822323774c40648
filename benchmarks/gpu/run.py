"""Prove and measure the GPU path in ten minutes: `make gpu`, on one NVIDIA GPU and without a network.

    python benchmarks/gpu/run.py --out OUT [--minutes 9] [--parts A,B,C] [--from EARLIER_OUT]
    python benchmarks/gpu/run.py --device cpu --size tiny        the same script, in a minute, without a GPU

Part A checks that what the device computes is right, part B measures it, part C trains a draft head. After every check
`gpu.json` and `gpu.log` are complete; the table comes last. See docs/gpu.md for what to bring to a bare machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import ready
import report
from kit import FAILED, PASSED, STOPPED, Kit, NotRunError
from parts import PartsError, join

LOCAL = ready.ROOT / ".gpu"
SHARES = {"A": 0.33, "B": 0.42, "C": 0.25}
"""Of the time, by part; what is left of one goes to those after it."""


def main() -> int:
    given = arguments()
    ready.paths()
    asked = {name: getattr(given, name) for name in ("device", "size", "minutes", "parts", "model")}
    kit = Kit(given.out, given.minutes, asked, at_end=show)
    wheels, wrong = ready.install(given.wheels)
    kit.check("-", "packages", lambda: packages(wheels, wrong), needs=0)
    kit.facts["machine"] = machine()
    given.work.mkdir(parents=True, exist_ok=True)
    kit.check("-", "the model", lambda: brought(given), needs=0)
    kit.check("-", "the device", lambda: device_of(given), needs=0)
    if kit.rows[-1].outcome == PASSED:
        parts(kit, given)
    kit.finish()
    return int(any(row.outcome in (FAILED, STOPPED) for row in kit.rows))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT") or ready.ROOT / "runs" / "gpu" / "out"))
    add("--work", type=Path, default=ready.ROOT / "runs" / "gpu" / "work", help="stays between runs, for part C")
    add("--device", default="cuda")
    add("--size", choices=("full", "tiny"), default="full")
    add("--minutes", type=float, default=9.0, help="the kit ends within them (default: %(default)s)")
    add("--parts", default="A,B,C", help="which parts to run (default: %(default)s)")
    add("--model", help="what stands for the embedded model (default: smollm2; at size tiny a random folder)")
    add("--model-parts", type=Path, default=LOCAL / "parts", help="of `parts.py cut` (default: .gpu/parts)")
    add("--wheels", type=Path, default=ready.ROOT / ".whl", help="wheels of missing packages (default: .whl)")
    add("--from", dest="earlier", type=Path, help="what an earlier run left in OUT: part C goes on from there")
    given = parser.parse_args()
    if unknown := set(given.parts.split(",")) - set(SHARES):
        parser.error(f"--parts knows A, B and C, not {', '.join(sorted(unknown))}")
    if not 0 < given.minutes <= 600:
        parser.error(f"--minutes lies between 0 and 600, not at {given.minutes}")
    return given


def packages(wheels: list[str], wrong: str) -> tuple[str, dict[str, Any]]:
    """What was installed, and what is missing all the same."""
    lacking = ready.missing()
    values = {"wheels": wheels, "missing": lacking}
    if wrong:
        raise RuntimeError(wrong)
    if lacking:
        raise NotRunError(f"{', '.join(lacking)} missing: bring the wheels in .whl; what needs them does not run")
    return f"all that decodery requires is there; {len(wheels)} wheels installed", values


def machine() -> dict[str, Any]:
    """Processor, GPUs and versions, with those of what is compared."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from decodery.core.machine import describe

    def known(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    found = {
        **describe(),
        **{name: known(name) for name in ("transformers", "triton")},
        "cuda": torch.version.cuda or "",
    }
    return found


def brought(given: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The model, joined of its parts where they were brought; at size tiny a random one."""
    from decodery.models.loaders.package_index import gguf_path, is_pulled

    if given.model is None and given.size == "tiny":
        from tiny_models import make_model, save

        given.model = str(given.work / "model")
        if not (given.work / "model" / "config.json").is_file():
            save(make_model("llama"), given.work / "model")
        return "a small random one stands for the embedded model", {}
    if given.model is not None:
        return f"{given.model} stands for the embedded model", {}
    if (given.model_parts / "manifest.json").is_file():
        try:
            join(given.model_parts, gguf_path("smollm2"))
        except PartsError as error:
            raise NotRunError(str(error)) from error
    if not is_pulled("smollm2"):
        raise NotRunError(f"the embedded model is not here: bring its parts in {given.model_parts}")
    return f"{gguf_path('smollm2')} is whole", {}


def device_of(given: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Whether there is such a device."""
    import torch

    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise NotRunError("there is no CUDA device: use a machine with one, or --device cpu --size tiny")
    device = torch.device(given.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
    return f"{device}: {name}", {"memory_gib": _memory(device)}


def _memory(device: Any) -> float | None:
    import torch

    return round(torch.cuda.mem_get_info(device)[1] / 2**30, 1) if device.type == "cuda" else None


def parts(kit: Kit, given: argparse.Namespace) -> None:
    """The parts that were asked for, in order; those that were not are written down as such."""
    import torch
    from correctness import Correctness
    from speed import Speed
    from training import Training

    device, few, wanted = torch.device(given.device), given.size == "tiny", given.parts.split(",")
    load = loader(given)

    def keeps(part: str) -> float:
        return 60 * given.minutes * sum(share for later, share in SHARES.items() if later > part and later in wanted)

    runs = {
        "A": lambda: Correctness(kit, device, load, few, keeps("A")).run(),
        "B": lambda: Speed(kit, device, load, few, keeps("B")).run(),
        "C": lambda: Training(kit, device, load, few, given.work, given.earlier).run(),
    }
    for part, run in runs.items():
        if part in wanted:
            run()
        else:
            kit.check(part, "all of it", not_asked, needs=0)


def not_asked() -> tuple[str, dict[str, Any]]:
    """A part that was left out on purpose."""
    raise NotRunError("--parts left it out")


def loader(given: argparse.Namespace) -> Any:
    """Loads what stands for the embedded model, once for each dtype and device."""
    from decodery.models.loaders.load import load
    from decodery.models.loaders.package_index import is_pulled
    from decodery.models.torch.transformer import Transformer

    @cache
    def loaded(dtype: str, device: Any) -> Any:
        if given.model is None and not is_pulled("smollm2"):
            raise NotRunError("the embedded model is not here")
        try:
            found = load(given.model or "smollm2", dtype=dtype, device=str(device))
        except ModuleNotFoundError as error:
            raise NotRunError(f"the package {error.name} is missing: bring its wheel in .whl") from error
        if not isinstance(found.model, Transformer):
            raise NotRunError(f"{found.name} runs through transformers, which has no graphs: give another model")
        return found

    return loaded


def show(kit: Kit) -> None:
    """The table, last."""
    kit.note(f"all of it is in {kit.out / 'gpu.json'}")
    print("\n" + report.table(kit.result()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
