"""What drafters remember: one kind of memory per file, each with its bound."""
