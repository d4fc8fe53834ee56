"""What fits into a GPU's memory, without the GPU: `kvseek build --plan`."""
