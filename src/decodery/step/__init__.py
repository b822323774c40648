"""What the four parts of a step share: requests for forward passes, the state of a request, draft trees."""
