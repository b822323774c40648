"""A program that reads the tokenizer.json on its standard input, and says on standard output what is wrong with it.

The tokenizers library ends its process on some damaged files, as it asks for more memory than there is. Here it may.
Exit status 0 and no output: the file reads, and the tokenizer encodes.
"""

from __future__ import annotations

import os
import sys

MOST_BYTES = 3 << 30
# Every byte, letters of many scripts and a run: what a tokenizer that cannot encode fails at.
SAMPLES = ("", "a" * 300, " Ab  c\n\t1234 é ß 漢字 नमस्ते \U0001f600", "".join(map(chr, range(256))))


def main() -> None:
    """Read and encode within a limit of memory where the system has one."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    except (ImportError, OSError, ValueError):
        pass
    # What the library says of its panics, nobody is to read.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode())
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        for sample in (*SAMPLES, " a ".join(added[:256])):
            backend.encode(sample)
    except BaseException as error:
        sys.stdout.write(ascii((str(error).strip() or type(error).__name__).splitlines()[0][:200])[1:-1])


if __name__ == "__main__":
    main()
