"""Needle tasks: questions about made-up facts in a long context, whose answers cannot be guessed. README.md explains them."""
