"""Loads an engine directory and generates tokens. Method-neutral: nothing here names a retrieval method."""
