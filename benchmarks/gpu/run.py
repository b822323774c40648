"""Prove and measure the GPU path in ten minutes: `make gpu`, on one NVIDIA GPU and without a network.

    python benchmarks/gpu/run.py --out OUT [--minutes 9] [--parts A,B,C,D] [--from EARLIER_OUT]
    python benchmarks/gpu/run.py --device cpu --size tiny        the same script, in a minute, without a GPU

Part A checks that what the device computes is right, part B measures it, part C trains a draft head, part D checks all
drafters. After every check `gpu.json` and `gpu.log` are complete; the table comes last. A check that breaks its process
or hangs costs its own line. See docs/gpu.md for what to bring to a bare machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import ready
import report
from kit import FAILED, PASSED, RESULTS, STOPPED, Broken, Kit, NotRunError
from parts import PartsError, join
from supervise import AGAIN, supervised

LOCAL = ready.ROOT / ".gpu"
SHARES = {"A": 0.22, "B": 0.45, "C": 0.15, "D": 0.18}
"""Of the time, by part; what is left of one goes to those after it."""


def main() -> int:
    given = arguments()
    if given.begun is not None:
        return checks(given)
    begun = monotonic()
    for name in (RESULTS, "gpu.log"):
        (given.out / name).unlink(missing_ok=True)
    command = [sys.executable, *sys.argv, "--begun", repr(begun)]
    result = supervised(command, given.out, begun + 60 * given.minutes)
    print(f"\nall of it is in {given.out / RESULTS}\n\n{report.table(result)}", flush=True)
    return int(not result["complete"] or any(row["outcome"] in (FAILED, STOPPED) for row in result["rows"]))


def checks(given: argparse.Namespace) -> int:
    """What a process of its own does: the checks that are not in the results yet."""
    ready.paths()
    if given.device == "cpu":
        # Before anything imports Triton.
        os.environ["TRITON_INTERPRET"] = "1"
    asked = {name: getattr(given, name) for name in ("device", "size", "minutes", "parts", "model")}
    kit = Kit(given.out, given.minutes, asked, given.begun)
    kit.write()
    wheels, wrong = ready.install(given.wheels)
    try:
        kit.check("-", "packages", lambda: packages(wheels, wrong), needs=0)
        kit.facts["machine"] = machine()
        given.work.mkdir(parents=True, exist_ok=True)
        if given.model is None and given.size == "tiny":
            given.model = str(given.work / "model")
        kit.check("-", "the model", lambda: brought(given), needs=0)
        if kit.check("-", "the device", lambda: device_of(given), needs=0).outcome == PASSED:
            kit.alive = lambda: alive(given.device)
            parts(kit, given)
    except Broken:
        return AGAIN
    kit.finish()
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT") or ready.ROOT / "runs" / "gpu" / "out"))
    add("--work", type=Path, default=ready.ROOT / "runs" / "gpu" / "work", help="stays between runs, for part C")
    add("--device", default="cuda")
    add("--size", choices=("full", "tiny"), default="full")
    add("--minutes", type=float, default=9.0, help="the kit ends within them (default: %(default)s)")
    add("--parts", default="A,B,C,D", help="which parts to run (default: %(default)s)")
    add("--model", help="what stands for the embedded model (default: smollm2; at size tiny a random folder)")
    add("--model-parts", type=Path, default=LOCAL / "parts", help="of `parts.py cut` (default: .gpu/parts)")
    add("--wheels", type=Path, default=ready.ROOT / ".whl", help="wheels of missing packages (default: .whl)")
    add("--from", dest="earlier", type=Path, help="what an earlier run left in OUT: part C goes on from there")
    add("--begun", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.parts.split(",")) - set(SHARES):
        parser.error(f"--parts knows A, B, C and D, not {', '.join(sorted(unknown))}")
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

    if given.model == str(given.work / "model"):
        from tiny_models import make_model, save

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


def alive(device: str) -> bool:
    """Whether a device still computes: after some faults all that follows in a process fails."""
    import torch

    try:
        return float(torch.ones(2, device=device, dtype=torch.float32).sum()) == 2.0
    except RuntimeError:
        return False


def _memory(device: Any) -> float | None:
    import torch

    return round(torch.cuda.mem_get_info(device)[1] / 2**30, 1) if device.type == "cuda" else None


def parts(kit: Kit, given: argparse.Namespace) -> None:
    """The parts that were asked for, in order; those that were not are written down as such."""
    import torch
    from correctness import Correctness
    from kernel_checks import Kernels
    from speed import Speed
    from training import Training

    device, few, wanted = torch.device(given.device), given.size == "tiny", given.parts.split(",")
    load = loader(given)

    def keeps(part: str) -> float:
        return 60 * given.minutes * sum(share for later, share in SHARES.items() if later > part and later in wanted)

    # What these find not to work is left out of all parts.
    Kernels(kit, device, few, keeps("A")).run()
    runs = {
        "A": lambda: Correctness(kit, device, load, few, keeps("A")).run(),
        "B": lambda: Speed(kit, device, load, few, keeps("B")).run(),
        "C": lambda: Training(kit, device, load, few, keeps("C"), given.work, given.earlier).run(),
        "D": lambda: Correctness(kit, device, load, few, 0.0).rest(),
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


if __name__ == "__main__":
    sys.exit(main())
