"""Inputs of Triton's models for tritonclient."""

from __future__ import annotations

from typing import Any

import numpy as np
import tritonclient.grpc as grpc

UNSIGNED = ("seed", "random_seed")
DTYPES: dict[str, Any] = {"BYTES": object, "BOOL": bool, "UINT64": np.uint64, "FP32": np.float32, "INT32": np.int32}


def grpc_input(name: str, datatype: str, values: Any) -> grpc.InferInput:
    """The input of a datatype, with the shape that the nested lists `values` have."""
    array = np.array(values, DTYPES[datatype])
    tensor = grpc.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def inputs_of(fields: dict[str, Any]) -> list[grpc.InferInput]:
    """Inputs of a batch of one, [1, n] each; the datatypes follow from the values, but for those that are unsigned."""
    return [_input_of(name, value if isinstance(value, list) else [value]) for name, value in fields.items()]


def _input_of(name: str, values: list[Any]) -> grpc.InferInput:
    if isinstance(values[0], bytes | str):
        return grpc_input(name, "BYTES", [[item.encode() if isinstance(item, str) else item for item in values]])
    if isinstance(values[0], bool):
        return grpc_input(name, "BOOL", [values])
    if name in UNSIGNED:
        return grpc_input(name, "UINT64", [values])
    return grpc_input(name, "FP32" if isinstance(values[0], float) else "INT32", [values])
