"""`--runtime tensorrt`: the decoder as plans of TensorRT in place of weights."""
