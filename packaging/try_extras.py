"""Tries every extra alone: its own part works, and the parts of the others name the extra that they need.

`python packaging/try_extras.py dist/decodery-*.whl --torch torch==2.13.0` makes an environment of the wheel for each
extra, in `--work` or a temporary folder, and prints what came of each part. The status is 1 where anything is
otherwise. The Python that runs it needs transformers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from argparse import ArgumentParser
from pathlib import Path

from extras import needed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BloomConfig, BloomForCausalLM

SERVED = """
import json, subprocess, sys, time, urllib.request
server = subprocess.Popen([sys.executable, "-m", "decodery", "serve", "--port", "18431", *sys.argv[1:]])
try:
    for _ in range(240):
        time.sleep(0.5)
        if server.poll() is not None:
            sys.exit(server.returncode)
        try:
            body = json.dumps({"prompt": "Name a river.", "max_tokens": 8}).encode()
            url, kind = "http://127.0.0.1:18431/v1/completions", {"Content-Type": "application/json"}
            print(urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=60).read().decode())
            break
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            continue
finally:
    server.terminate()
    server.wait()
"""
FOLDER = """
import decodery
print(decodery.load("bloom").generate([5, 6, 7], max_new_tokens=8).tokens)
"""
TYPED = """
import decodery
from decodery.constraints.python_type import PythonType
lm = decodery.load("smollm2")
print(lm.generate("Count to three.", max_new_tokens=24, constraint=PythonType(list[int])).text)
"""
CHECKS = {
    "": ["-m", "decodery", "generate", "Name a river.", "--max-new-tokens", "8"],
    "constrain": ["-c", TYPED],
    "serve": ["-c", SERVED],
    "transformers": ["-c", FOLDER],
    "ray": ["-m", "decodery", "batch", "--ray", "in.jsonl", "out.jsonl"],
}
"""What an extra brings, and "" without one."""
LINE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 4}}\n'


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--extras", nargs="*", choices=CHECKS, default=[*CHECKS])
    parser.add_argument("--work", type=Path)
    asked = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        work = (asked.work or Path(name)).resolve()
        for extra in asked.extras:
            env = work / (extra or "none")
            venv.create(env, with_pip=True)
            (env / "in.jsonl").write_text(LINE)
            BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=32, n_layer=2, n_head=4)).save_pretrained(
                env / "bloom"
            )
            Tokenizer(WordLevel({f"w{id}": id for id in range(256)}, "w0")).save(str(env / "bloom" / "tokenizer.json"))
            wheel = f"{asked.wheel.resolve()}[{extra}]" if extra else str(asked.wheel.resolve())
            run(env, "-m", "pip", "install", "--quiet", "--no-compile", asked.torch, wheel).check_returncode()
            for part, command in CHECKS.items():
                said = verdict(run(env, *command), extra, part)
                wrong += said.startswith("WRONG")
                print(f"{extra or 'no extra'}: {part or 'generate'}: {said}", flush=True)
    return min(wrong, 1)


def verdict(done: subprocess.CompletedProcess[str], extra: str, part: str) -> str:
    """What became of a part where this extra is installed."""
    brought = not part or part == extra or (extra and set(needed(part)) <= set(needed(extra)))
    said = (done.stdout + done.stderr).strip()
    if not done.returncode:
        return "works" if brought else "works without its extra"
    if not brought and f"decodery[{part}]" in said:
        return said.splitlines()[-1]
    return f"WRONG, status {done.returncode}: {said[-600:]}"


def run(env: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of an environment, in it."""
    around = {"PATH": f"{env / 'bin'}:/usr/bin:/bin", "HOME": os.environ["HOME"], "CC": "false", "CXX": "false"}
    around |= {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "OMP_", "DECODERY_"))}
    return subprocess.run([env / "bin" / "python", *command], env=around, cwd=env, text=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
