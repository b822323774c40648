"""Making what methods need: datastores and trained parts."""

from ..faces import face

__getattr__, __dir__ = face(__name__)
