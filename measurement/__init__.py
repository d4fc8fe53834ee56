"""What evaluation and benchmarks share: the machine, results as JSON, variants of methods."""
