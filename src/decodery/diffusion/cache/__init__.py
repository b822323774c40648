"""Which keys and values of a canvas are kept from pass to pass, though rows see what comes later. One file each."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
