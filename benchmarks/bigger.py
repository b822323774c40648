"""Memory, load time, disk and speed of models of several sizes at their own precision, beside other programs.

    python benchmarks/bigger.py smollm2 gemma-3-270m-q4_k_m.gguf qwen-shaped-0.5B.gguf qwen-shaped-1.5B.gguf --rounds 2

Every figure comes from a process of its own, and rounds of all programs alternate. Wall clock from the start of the
process to its first token, with the interpreter and all imports (warm: the file is in the system's cache and what this
package keeps beside it has been made; cold: it has not); the largest resident memory, and what of it no file stands
after; bytes that a program keeps on disk beside the model's file; tokens per second after the prompt, one text and
sixteen together, greedy. A model whose name begins with "qwen-shaped" has drawn weights (benchmarks/random_gguf.py):
its texts mean nothing, so that drafts are not measured on it. Passes: milliseconds of 1, 8 and 16 rows after 128
tokens, and the share of the bandwidth that the same process measured right before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from decodery_benchmarks.results import begun_result, write_result

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "bigger.json"
QUESTION = "Explain how tides work, and why there are two of them a day."
SUBJECTS = ("tides", "glass", "yeast", "clouds", "rust", "bees", "salt", "magnets")
TOGETHER = [f"{how} {what} in detail." for what in SUBJECTS for how in ("Explain", "Describe the history of")]
TOOLS = ("decodery", "decodery int8", "llama.cpp", "openvino")


def memory(process: str = "self") -> dict[str, int]:
    """Megabytes of a process: the peak of resident memory, and what is resident and belongs to no file."""
    told = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line)
    own = sum(int(told[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return {"peak_mb": int(told["VmHWM"].split()[0]) // 1024, "own_mb": own // 1024}


def ours(model: str, dtype: str, tokens: int, begun: float) -> dict[str, Any]:
    import decodery
    from decodery.core.native.kernels import read_bandwidth
    from decodery.models.footprint import weight_bytes
    from decodery.step.pass_cost import time_passes

    lm = decodery.load(model, dtype=dtype)
    loaded = time.time() - begun
    lm.generate(QUESTION, max_new_tokens=1, drafter=None)
    found: dict[str, Any] = {"precision": lm.dtype, "loaded_s": loaded, "first_token_s": time.time() - begun}
    found["plain"] = _rate(lambda n: [lm.generate(QUESTION, max_new_tokens=n, drafter=None)], tokens)
    found |= memory()
    if not Path(model).name.startswith("qwen-shaped"):
        found["auto"] = _rate(lambda n: [lm.generate(QUESTION, max_new_tokens=n)], 4 * tokens)
    found["together"] = _rate(lambda n: lm.generate(TOGETHER, max_new_tokens=n, drafter=None), tokens)
    bandwidth = read_bandwidth(mebibytes=256)
    timings = time_passes({"": lm.model}, [1, 8, 16], enough=lambda done: done >= 5)[""]
    bandwidth = max(bandwidth, read_bandwidth(mebibytes=256))
    found["pass_ms"] = {str(rows): 1e3 * statistics.median(times) for rows, times in timings.items()}
    found["read_gb_per_s"] = bandwidth
    found["share"] = weight_bytes(lm.model) / 1e6 / found["pass_ms"]["1"] / bandwidth
    return found


def _rate(generate: Any, tokens: int) -> float:
    """Tokens per second after the first one of each text."""
    generate(1)
    begin = time.perf_counter()
    first = generate(1)
    middle = time.perf_counter()
    whole = generate(tokens)
    seconds = (time.perf_counter() - middle) - (middle - begin)
    return (sum(len(out.tokens) for out in whole) - len(first)) / seconds


def llama_cpp(model: str, tokens: int, begun: float) -> dict[str, Any]:
    from decodery_benchmarks.peers.llama_cpp_server import LlamaCppServer

    server = LlamaCppServer(sys.executable, Path(model), _threads(), room=1024)
    loaded = time.time() - begun
    prompt = server.ask("/tokenize", content=QUESTION, add_special=True)["tokens"]
    settings = {"temperature": 0.0, "ignore_eos": True}
    times = [time.time() for event in server.stream(prompt, tokens, **settings) if event["tokens"]]
    found: dict[str, Any] = {"precision": "its own", "loaded_s": loaded, "first_token_s": times[0] - begun}
    found |= {"plain": (len(times) - 1) / (times[-1] - times[0])} | memory(str(server.process))
    server.close()
    return found


def openvino(model: str, tokens: int, begun: float) -> dict[str, Any]:
    import openvino_genai as genai

    pipeline = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=_threads())
    loaded, times = time.time() - begun, []

    def told(_: str) -> Any:
        times.append(time.time())
        return genai.StreamingStatus.RUNNING

    config = genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = tokens, False, True
    pipeline.generate(QUESTION, config, told)
    found: dict[str, Any] = {"precision": "its own", "loaded_s": loaded, "first_token_s": times[0] - begun}
    return found | {"plain": (len(times) - 1) / (times[-1] - times[0])} | memory()


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1


def child(tool: str, model: str, tokens: int, begun: float) -> dict[str, Any]:
    path = model
    if tool.startswith("decodery"):
        return ours(model, tool.partition(" ")[2] or "auto", tokens, begun)
    if not model.endswith(".gguf"):
        from decodery.models.loaders.package_index import gguf_path

        path = str(gguf_path(model))
    return (llama_cpp if tool == "llama.cpp" else openvino)(path, tokens, begun)


def started(tool: str, model: str, tokens: int, home: Path | None = None) -> dict[str, Any]:
    """What a process of its own finds, or why it found nothing."""
    environment = os.environ | ({} if home is None else {"DECODERY_HOME": str(home)})
    command = [sys.executable, __file__, "--child", tool, str(time.time()), "--tokens", str(tokens), model]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"refused": (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def cold(model: str, tool: str) -> dict[str, Any]:
    """The first start of all, and the bytes that it leaves on disk."""
    from decodery.models.loaders.package_index import gguf_path

    with tempfile.TemporaryDirectory() as home:
        if not model.endswith(".gguf"):
            (Path(home) / "models").mkdir()
            source = gguf_path(model)
            (Path(home) / "models" / source.name).symlink_to(source)
        found = started(tool, model, 2, Path(home))
        kept = sum(path.stat().st_size for path in Path(home, "converted").rglob("*") if path.is_file())
    return {"first_token_s": found.get("first_token_s"), "disk_mb": round(kept / 1e6)}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of numbers; what is no number as the first run has it."""
    found: dict[str, Any] = {}
    for key, value in runs[0].items():
        if isinstance(value, dict):
            found[key] = summary([run[key] for run in runs])
        else:
            found[key] = statistics.median(run[key] for run in runs) if isinstance(value, int | float) else value
    return found


def _rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return float(f"{found:.4g}") if isinstance(found, float) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--cold", action="store_true", help="measure the first start of all, too")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        tool, begun = options.child
        print(json.dumps(child(tool, options.models[0], options.tokens, float(begun))))
        return

    kept = begun_result(options.out)
    threads = {"threads": _threads(), "tokens": options.tokens, "rounds": options.rounds}
    kept |= threads
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def note(model: str, tool: str, **more: Any) -> None:
        found = runs[model, tool]
        whole = [run for run in found if "refused" not in run]
        row = summary(whole) | {"runs": len(whole)} if whole else found[0]
        tools = kept["rows"].setdefault(Path(model).stem, {"file_mb": round(_file(model).stat().st_size / 1e6)})
        tools[tool] = _rounded(row | more)
        # What a run that is cut off has found stays.
        write_result(options.out, kept)
        print(model, tool, tools[tool], flush=True)

    for _ in range(options.rounds):
        for model in options.models:
            for tool in options.tools.split(","):
                runs.setdefault((model, tool), []).append(started(tool, model, options.tokens))
                note(model, tool)
    for model, tool in runs:
        if options.cold and tool.startswith("decodery"):
            note(model, tool, cold=cold(model, tool))


def _file(model: str) -> Path:
    from decodery.models.loaders.package_index import gguf_path

    return Path(model) if model.endswith(".gguf") else gguf_path(model)


if __name__ == "__main__":
    main()
