"""`python -m decodery` is the `decodery` command."""

from decodery.cli.main import process

if __name__ == "__main__":
    process()
