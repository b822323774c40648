"""Training of the small models, reward models and probes that experiments need."""
