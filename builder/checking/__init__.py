"""`kvseek build --check`: the engine's logits beside those of transformers' model of the same checkpoint."""
