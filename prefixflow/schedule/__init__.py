"""Plan -> table of operations per rank (pure)."""
