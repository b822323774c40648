"""Tree policies: how the guesses of a drafter that can expand become a tree. One file per policy."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
