"""Expert sharing: the positions of a canvas share experts of a mixture, so that a pass reads fewer. One file each."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
