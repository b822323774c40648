"""From logits to the distribution that is sampled: processors, one per file, and the sampler that orders them."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
