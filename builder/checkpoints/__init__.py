"""Checkpoints that the builder reads, of three kinds behind one interface, and the weights that it writes from them."""
