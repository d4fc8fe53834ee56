"""The latest rows: attends to the last tokens that have left the window. docs/add_a_method.md shows it."""
