"""What the builder reads: checkpoints of three kinds behind one interface, and the weights that are written from them."""
