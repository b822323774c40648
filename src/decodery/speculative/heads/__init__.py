"""Draft heads: small trained networks that guess on from the target's own hidden states."""
