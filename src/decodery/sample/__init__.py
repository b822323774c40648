"""From logits to the distribution that is sampled: warps, one per file, and the sampler that orders them."""

from ..faces import face

__getattr__, __dir__ = face(__name__)
