"""Benchmarks that are no part of the package.

    python benchmarks/bench.py {methods,search,monitors,parallelbench,long-context,sweep} --help

methods is `decodery bench` with other programs beside its methods; search measures searches on puzzles, monitors what
monitors detect, parallelbench diffusion decoders, long-context KV cache policies, sweep scaling laws of drafts.
"""

import click

from decodery.cli.main import main
from decodery_benchmarks.commands.long_context import long_context
from decodery_benchmarks.commands.methods import methods
from decodery_benchmarks.commands.monitors import monitors
from decodery_benchmarks.commands.parallelbench import parallelbench
from decodery_benchmarks.commands.search import search
from decodery_benchmarks.commands.sweep import sweep

bench = click.Group(
    "bench",
    commands=[methods, search, monitors, parallelbench, long_context, sweep],
    help="Benchmarks that are no part of the package.",
)

if __name__ == "__main__":
    main(group=bench, name="python benchmarks/bench.py")
