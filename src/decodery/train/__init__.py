"""Making what methods need: datastores and trained parts."""
