"""KV caches: pages of slots, and what attention reads of them."""
