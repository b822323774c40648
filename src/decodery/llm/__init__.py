"""The facade: models as their users see them."""
