"""Interfaces that the four parts of a step share: forward requests, the state of a text, draft trees."""
