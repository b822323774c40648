"""A small package for the monitor's tests and figures: names a model would not guess, of every kind there is."""
