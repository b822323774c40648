"""Files of requests answered by two workers of a Ray cluster on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import decodery as dc
from serving import SECONDS, user, wait_until

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'decodery[ray]'")
COUNT = 40


def line(number: int) -> str:
    body = {"messages": user(f"Name {number + 2} colours."), "max_tokens": 12, "temperature": 0.8, "seed": number}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


@needs_ray
def test_a_killed_batch_goes_on_and_its_texts_are_those_of_one_process(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*map(line, range(COUNT)), "{"]))
    command = [sys.executable, "-m", "decodery", "batch", "--kv-gib", "0.25", str(source), str(out)]
    cluster = [*command, "--ray", "--replicas", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def written() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    process = subprocess.Popen(cluster, env=environment, stderr=subprocess.DEVNULL)
    try:
        # The cluster has to start, and two processes load the model.
        wait_until(lambda: written() >= 9 or process.poll() is not None, 4 * SECONDS)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = written()
    assert 9 <= kept < COUNT + 1
    first = out.read_bytes().rpartition(b"\n")[0]
    done = subprocess.run(cluster, env=environment, capture_output=True, text=True)
    # One line is no request.
    assert done.returncode == 1, done.stderr
    assert f"{kept} earlier, of {COUNT + 1}" in done.stderr and "invalid" not in done.stderr
    assert out.read_bytes().startswith(first)
    # One process goes on in the same file, and finds nothing left to do.
    alone = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"0 answered, 0 of them with an error, {COUNT + 1} earlier" in alone.stderr
    answers = [json.loads(text) for text in out.read_text().splitlines()]
    found = {each["custom_id"]: each["response"] for each in answers if each["error"] is None}
    assert len(answers) == COUNT + 1 and len(found) == COUNT
    lm = dc.load("smollm2")
    for number in range(0, COUNT, 5):
        asked = json.loads(line(number))["body"]
        wanted = lm.generate(asked["messages"], max_new_tokens=12, temperature=0.8, seed=number).text
        assert found[f"r{number}"]["body"]["choices"][0]["message"]["content"] == wanted


@needs_ray
def test_a_worker_that_cannot_begin_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line(0))
    command = [sys.executable, "-m", "decodery", "batch", "--ray", "--model", str(tmp_path / "nothing.gguf")]
    done = subprocess.run([*command, str(tmp_path / "in.jsonl"), str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("nothing.gguf") == 1 and 'File "' not in done.stderr
