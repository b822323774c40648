"""Growth policies: how the guesses of a drafter that can expand become a tree. One file per policy."""
