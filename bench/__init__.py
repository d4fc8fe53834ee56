"""The common part of evaluation and benchmarks: the machine, results as JSON, variants of methods."""
