"""A training that real signals end, while it writes a checkpoint, goes on from the one before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from commands import inside
from decodery.training.llada_folder import MODEL
from decodery.training.loop import CHECKPOINT

COMMAND = ["train", "diffusion", "--size", "xs", "--steps", "6", "--batch", "8", "--out"]
CHILD = """
import itertools, sys, time
from pathlib import Path
from decodery.cli.main import main
from decodery.models.loaders.store import replacing
from decodery.training import loop

# A checkpoint is due after each step. The third one is never whole.
loop.monotonic, loop._BETWEEN, keep, saves = itertools.count(0, 60).__next__, 0, loop.keep, []

def keeping(path, *given, **about):
    saves.append(path)
    if len(saves) < 3:
        return keep(path, *given, **about)
    with replacing(path) as temporary:
        Path(temporary).write_bytes(b"a part")
        print("writing", flush=True)
        time.sleep(600)

loop.keep = keeping
main(sys.argv[1:])
"""


def killed(out: Path, kind: signal.Signals) -> None:
    """Run the command in a process of its own, and end it by a signal in its third checkpoint."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DECODERY_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, *COMMAND, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "writing\n", child.stderr.read()
        child.send_signal(kind)
        assert child.wait() == -kind


def test_a_training_goes_on_after_real_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERY_HOME", str(tmp_path / "home"))
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert inside(*COMMAND, str(whole))[0] == 0
    for kind, step in ((signal.SIGTERM, 2), (signal.SIGKILL, 4)):
        killed(out, kind)
        with safe_open(out / "training" / CHECKPOINT, "pt") as file:
            assert json.loads(file.metadata()["history"])["step"] == step
    assert inside(*COMMAND, str(out))[0] == 0
    for name in (MODEL, f"training/{CHECKPOINT}"):
        expected, found = load_file(whole / name), load_file(out / name)
        assert set(expected) == set(found)
        assert all(torch.equal(found[each], tensor) for each, tensor in expected.items())
