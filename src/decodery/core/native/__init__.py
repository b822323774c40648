"""The native kernels, called through a plain C interface."""
