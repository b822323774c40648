"""Training of what only experiments need: models of puzzles and of generated tasks, and their reward models.

python benchmarks/train.py {puzzle-model,pldr,prm,orpo,grpo,compute-optimal,program-probe,seq2seq,sources} --help
"""

import click

from decodery.cli.main import main
from decodery_benchmarks.commands.train_program_probe import program_probe
from decodery_benchmarks.commands.train_puzzles import compute_optimal, grpo, orpo, pldr, prm, puzzle_model
from decodery_benchmarks.commands.train_seq2seq import seq2seq
from decodery_benchmarks.commands.train_sources import sources

train = click.Group(
    "train",
    commands=[puzzle_model, pldr, prm, orpo, grpo, compute_optimal, program_probe, seq2seq, sources],
    help="Training of what only experiments need.",
)

if __name__ == "__main__":
    main(group=train, name="python benchmarks/train.py")
