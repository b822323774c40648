"""The process in which a tokenizer.json is read on trial.

The tokenizers library ends its process on some damaged files, as it asks for more memory than there is. Here it may.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# Every byte, letters of many scripts and a run: what a tokenizer that cannot encode fails at.
SAMPLES = ("", "a" * 300, " Ab  c\n\t1234 é ß 漢字 नमस्ते \U0001f600", "".join(map(chr, range(256))))


def begin() -> Callable[[str], str]:
    # Threads would each reserve memory of their own.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    return answer


def answer(text: str) -> str:
    """What is wrong with a tokenizer; empty where it reads and encodes."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(text)
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        for sample in (*SAMPLES, " a ".join(added[:256])):
            backend.encode(sample)
    except BaseException as error:
        return ascii((str(error).strip() or type(error).__name__).splitlines()[0][:200])[1:-1]
    return ""
