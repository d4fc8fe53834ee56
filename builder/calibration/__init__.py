"""`kvseek build --calibrate`: measures, on a text, what quantisation of the weights costs."""
