"""`kvseek build --calibrate`: what quantisation of the weights costs on a text."""
