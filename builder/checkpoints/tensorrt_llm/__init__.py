"""TensorRT-LLM checkpoints, whose tensors are spread over ranks."""
