"""Which experts of a mixture the places of a canvas share, so that a pass reads fewer of them. One file each."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
