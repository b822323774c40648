"""Replicas of Ray killed at random under load: no batch line and no whole answer is lost, and autoscaling adds some.

    python benchmarks/ray_load.py [--lines 120] [--seconds 60] [--kills 3]

First `decodery batch --ray` answers a file while its workers are killed; every line has to have the text that one
process writes. Then `decodery serve --ray --replicas 1-2` answers clients that come all at once, so that Ray adds a
replica, and replicas are killed: whole answers have to be those of one process, and streams are cut by an error event
or whole. What comes of it is in benchmarks/results/ray-load.json. The status is 1 where anything was lost. It needs
ray[data,serve].
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from decodery_benchmarks.results import write_result

PATIENCE = 240.0
CHAT = "/v1/chat/completions"
WORKER, REPLICA = b"MapWorker", b"ServeReplica:default:replica"


def body(number: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"Name {number + 2} colours."}]
    return {"model": "smollm2", "messages": turns, "max_tokens": 24, "temperature": 0.8, "seed": number}


def processes(root: int, named: bytes) -> list[int]:
    """Those of this name that a process has started, itself or by others."""
    parents, found = dict[int, int](), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if named in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue

    def below(process: int) -> bool:
        while process and process != root:
            process = parents.get(process, 0)
        return process == root

    return [each for each in found if below(each)]


def kill_one(root: int, named: bytes, chance: random.Random) -> bool:
    """Kill one at random; False where there is none."""
    if not (found := processes(root, named)):
        return False
    os.kill(chance.choice(found), signal.SIGKILL)
    return True


def batch(lines: int, kills: int, chance: random.Random, folder: Path) -> dict[str, Any]:
    """A file answered by workers that are killed, compared with the same by one process."""
    source, out, alone = folder / "in.jsonl", folder / "out.jsonl", folder / "alone.jsonl"
    asked = [
        {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body(number)} for number in range(lines)
    ]
    source.write_text("\n".join(map(json.dumps, asked)))
    command = [sys.executable, "-m", "decodery", "batch", "--kv-gib", "0.25", str(source)]
    done, begin = 0, time.monotonic()
    said = (folder / "said").open("wb")
    process = subprocess.Popen([*command, str(out), "--ray", "--replicas", "2"], stderr=said)
    while process.poll() is None:
        time.sleep(0.2)
        answered = out.read_bytes().count(b"\n") if out.exists() else 0
        if done < kills and answered > (done + 0.5) * lines / (kills + 1):
            done += kill_one(process.pid, WORKER, chance)
    seconds = time.monotonic() - begin
    if not out.exists():
        sys.exit(f"no line was answered: {(folder / 'said').read_text()[-2000:]}")
    subprocess.run([*command, str(alone)], stderr=subprocess.DEVNULL, check=True)
    texts, expected = texts_of(out), texts_of(alone)
    return {
        "name": "batch", "requests": lines, "killed": done, "status": process.returncode,
        "answered": len(texts), "errors": sum(each is None for each in texts.values()),
        "different": sum(texts[name] != expected[name] for name in texts), "seconds": round(seconds, 1),
    }  # fmt: skip


def texts_of(path: Path) -> dict[str, str | None]:
    """Texts by id, None for an error."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        each["custom_id"]: None
        if each["error"] or each["response"]["status_code"] != 200
        else each["response"]["body"]["choices"][0]["message"]["content"]
        for each in answers
    }


def served(seconds: float, kills: int, chance: random.Random, expected: dict[str, str | None]) -> dict[str, Any]:
    """Clients of one replica that becomes two, of which some are killed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "decodery", "serve", "--ray", "--replicas", "1-2", "--port", str(port)]
    process = subprocess.Popen([*command, "--kv-gib", "0.25", "--max-running", "8"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "is served at" in line:
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    url, counts, replicas, over = f"http://127.0.0.1:{port}{CHAT}", Counter[str](), set[str](), threading.Event()

    def client(seed: int) -> None:
        own = random.Random(seed)
        while not over.is_set():
            number, stream = own.randrange(len(expected)), own.random() < 0.5
            try:
                ask(number, stream)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                counts[f"{'stream' if stream else 'whole'}: {type(error).__name__}"] += 1

    def ask(number: int, stream: bool) -> None:
        wanted = expected[f"r{number}"]
        if not stream:
            answer = httpx.post(url, json=body(number), timeout=PATIENCE)
            replicas.add(answer.headers.get("x-replica", ""))
            if answer.status_code != 200:
                counts[f"whole: {answer.status_code}"] += 1
                return
            right = answer.json()["choices"][0]["message"]["content"] == wanted
            counts["whole: equal" if right else "whole: different"] += 1
            return
        text, ended = "", ""
        with httpx.stream("POST", url, json=body(number) | {"stream": True}, timeout=PATIENCE) as answer:
            if answer.status_code != 200:
                counts[f"stream: {answer.status_code}"] += 1
                return
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    found = json.loads(data)
                    ended = found["error"]["code"] if "error" in found else ended
                    text += "" if ended else found["choices"][0]["delta"].get("content") or ""
                ended = data if data == "[DONE]" else ended
        right = text == wanted if ended == "[DONE]" else (wanted or "").startswith(text)
        counts[f"stream: {ended or 'cut'}, {'equal' if right else 'different'}"] += 1

    before = len(processes(process.pid, REPLICA))
    done, most, begin = 0, before, time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(client, seed) for seed in range(16)]
        while (now := time.monotonic() - begin) < seconds or done < kills:
            time.sleep(0.5)
            most = max(most, len(processes(process.pid, REPLICA)))
            if done < kills and now > (done + 1) * seconds / (kills + 1):
                done += kill_one(process.pid, REPLICA, chance)
            if now > 5 * seconds:
                break
        over.set()
        for each in clients:
            each.result()
    process.send_signal(signal.SIGTERM)
    status = process.wait(120)
    return {"name": "serve", "replicas_before": before, "most_replicas": most, "killed": done, "status": status,
            "replicas_that_answered": len(replicas - {""}), "answers": dict(sorted(counts.items()))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ray-load.json")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        rows = [batch(given.lines, given.kills, chance, Path(folder))]
        rows.append(served(given.seconds, given.kills, chance, texts_of(Path(folder, "alone.jsonl"))))
    right = {"whole: equal", "stream: [DONE], equal", "stream: replica_lost, equal"}
    lost = rows[0]["requests"] - rows[0]["answered"] + rows[0]["errors"] + rows[0]["different"]
    wrong = sum(count for name, count in rows[1]["answers"].items() if name not in right)
    summary = {
        "lines_lost": lost,
        "answers_wrong": wrong,
        "scaled": rows[1]["most_replicas"] > rows[1]["replicas_before"],
    }
    write_result(given.out, {"rows": rows, "settings": vars(given) | {"out": ""}, "summary": summary})
    print(json.dumps({"rows": rows, **summary}, indent=1))
    sys.exit(0 if not lost and not wrong and summary["scaled"] else 1)


if __name__ == "__main__":
    main()
