"""`python -m decodery` is the `decodery` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
