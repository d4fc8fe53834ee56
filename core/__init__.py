"""The ground that all other packages stand on: errors, requests, and the files of an engine directory."""
