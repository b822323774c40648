"""Making what methods need: datastores and trained parts."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
