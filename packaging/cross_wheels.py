"""Makes the wheels of other machines from the wheel of this one, with a compiler for all of them.

    python packaging/cross_wheels.py dist/decodery-*.whl [--out dist] [--targets win_amd64 ...]

Everything in the package is Python but one library, which knows nothing of Python. So a wheel for another machine is
this wheel with that library compiled anew, from the same sources and options as in setup.py, by Zig (ziglang).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from distutils.core import run_setup
from pathlib import Path

from wheel.wheelfile import WheelFile

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path("decodery", "core", "native", "_native.so")
TARGETS = {
    "win_amd64": "x86_64-windows-gnu",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    asked = parser.parse_args()
    for platform in asked.targets:
        with tempfile.TemporaryDirectory() as name:
            print(rebuilt(asked.wheel.resolve(), platform, Path(name), asked.out.resolve()), flush=True)


def rebuilt(wheel: Path, platform: str, folder: Path, out: Path) -> Path:
    """The wheel of another platform, in `out`."""
    content = folder / "content"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(content)
    compiled(TARGETS[platform], folder, content / LIBRARY)
    (about,) = content.glob("*.dist-info/WHEEL")
    lines = [line for line in about.read_text("utf-8").splitlines() if not line.startswith("Tag:")]
    about.write_text("\n".join([*(line for line in lines if line), f"Tag: py3-none-{platform}", ""]), "utf-8")
    made = out / f"{'-'.join(wheel.name.split('-')[:2])}-py3-none-{platform}.whl"
    with WheelFile(made, "w") as file:
        file.write_files(content)
    return made


def compiled(target: str, folder: Path, library: Path) -> None:
    """Compile the library of setup.py for a target, in place of another's."""
    os.chdir(ROOT)
    (extension,) = run_setup("setup.py", stop_after="init").ext_modules
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", target, "-w"]
    options = [*extension.extra_compile_args, *([] if "windows" in target else ["-fPIC"])]

    def compile_one(source: str) -> str:
        made = folder / f"{Path(source).stem}.o"
        subprocess.run([*compiler, *options, "-c", source, "-o", made], check=True)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, extension.sources))
    subprocess.run([*compiler, "-shared", "-s", *objects, *extension.extra_link_args, "-o", library], check=True)


if __name__ == "__main__":
    main()
