"""kvseek's methods in the benchmarks of others, on their models: in transformers itself, kvpress and sparse-attention-hub."""
