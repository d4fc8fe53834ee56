"""The best blocks: codes choose among the rows of blocks whose mean keys answer best. docs/add_a_method.md shows it."""
