"""Capacity planning, `kvseek build --plan`: finds what fits into a GPU's memory, without the GPU."""
