"""A model of Triton, a client of the engine process, for all models of all layouts; server/triton/model.py has the code."""

import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from kvseek.server.triton.model import TritonModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO)
        self.model = TritonModel(pb_utils, args)

    def execute(self, requests: list[Any]) -> None:
        self.model.execute(requests)

    def finalize(self) -> None:
        self.model.finalize()
