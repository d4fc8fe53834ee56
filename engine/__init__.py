"""Loads an engine directory and generates tokens. Independent of methods: nothing here names a retrieval method."""
