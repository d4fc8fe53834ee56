"""`--runtime tensorrt`: builds the decoder as TensorRT plans, which hold the weights."""
