"""From a name to a model: files, folders, the Hub, adapters."""
