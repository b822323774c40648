"""The commands of benchmarks/bench.py and benchmarks/train.py."""
