"""`decodery info`: what this installation and this machine are, for a look and for bug reports."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import click

from .. import __version__

_X86 = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve")
"""Those that decide which kernels can run, by the names Linux gives them."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def info(as_json: bool) -> None:
    """Tell versions, processor, kernels, the cache folder and the models in it."""
    facts = collect()
    if as_json:
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        click.echo(f"{name:<{width}}  {shown or 'none'}")


def collect() -> dict[str, Any]:
    """All facts by name: texts, numbers and lists of texts."""
    import torch

    from ..model import embedded, native, store

    name, instructions = _processor()
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "decodery": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": instructions,
        "gpus": devices,
        "kernels": native.status(),
        "cache": str(store.home()),
        "models": [
            f"{model} ({what.summary}, {what.size / 1e6:.0f} MB)"
            for model, what in embedded.EMBEDDED.items()
            if embedded.is_pulled(model)
        ],
    }


def _processor() -> tuple[str, list[str]]:
    """Name and notable instruction sets; from the system's own list where there is one."""
    listing = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if listing.exists():
        for line in listing.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    flags = (fields.get("flags") or fields.get("features") or "").split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, [flag for flag in _X86 + _ARM if flag in flags]
