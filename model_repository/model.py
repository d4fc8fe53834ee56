"""A model of Triton: a door of the engine process, for all models of all layouts; server/triton/door.py has the code."""

import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from kvseek.server.triton.model import TritonModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO)
        self.door = TritonModel(pb_utils, args)

    def execute(self, requests: list[Any]) -> None:
        self.door.execute(requests)

    def finalize(self) -> None:
        self.door.finalize()
