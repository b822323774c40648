"""`python -m decodery` is the `decodery` command."""

from decodery.cli.main import main

if __name__ == "__main__":
    main()
