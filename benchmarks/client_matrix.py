"""Every endpoint with its real client: what each does with a server of the embedded model.

    python benchmarks/client_matrix.py [--python PATH] [CLIENT ...]

`--python` is an interpreter with the clients: pip install langchain-openai litellm instructor openai-agents
'pydantic-ai-slim[openai]' llm anthropic ollama cohere. What comes of it is in benchmarks/results/client-matrix.json,
and as a table on a page. The status is 1 where anything does not work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from decodery.bench.load.target import own
from decodery_benchmarks.results import write_result

HERE = Path(__file__).parent
MODEL = "smollm2"
CLIENTS = [
    "openai", "anthropic", "ollama", "cohere", "langchain", "litellm", "instructor", "openai_agents", "pydantic_ai",
    "llm",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", default=CLIENTS)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "client-matrix.json")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    with own(MODEL, "auto").open() as url:
        for name in given.clients:
            command = [given.python, str(HERE / "clients" / "tried.py"), name, url, MODEL]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=900)
            if ran.returncode:
                sys.exit(f"{name}: {ran.stderr[-2000:]}")
            found.append(json.loads(ran.stdout.strip().splitlines()[-1]))
            for row in found[-1]["rows"]:
                print(f"{found[-1]['client']:18} {row['endpoint']:26} {row['tried']:44} {row.get('fault', 'works')}")
    rows = [row for each in found for row in each["rows"]]
    write_result(given.out, {
        "command": "python benchmarks/client_matrix.py",
        "rows": found,
        "summary": {"tried": len(rows), "works": sum(row["works"] for row in rows)},
    })  # fmt: skip
    sys.exit(0 if all(row["works"] for row in rows) else 1)


if __name__ == "__main__":
    main()
