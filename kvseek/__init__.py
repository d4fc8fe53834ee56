"""kvseek: serve long-context Llama and Qwen models from a KV cache in host memory.

    from kvseek import LLM, SamplingParams

    with LLM("HuggingFaceTB/SmolLM2-135M-Instruct", method="nested") as llm:
        for output in llm.generate(["The sea", "A ship"], SamplingParams(max_tokens=20)):
            print(output.text)

docs/python.md describes the Python API. The names below are imported when they are first used: a process that needs only
`kvseek.core`, such as a server's frontend, must not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvseek.core.errors import ConfigError, KvseekError, RequestError
    from kvseek.core.guide import Guide, GuideType
    from kvseek.core.request import EndedSession, Session
    from kvseek.core.selected_rows import RowReport, SelectedRows

    from .async_llm import AsyncLLM
    from .generation import GenerationError
    from .llm import LLM
    from .outputs import OutputPiece, RequestOutput
    from .prefix import Prefix
    from .sampling_params import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "ConfigError",
    "EndedSession",
    "GenerationError",
    "Guide",
    "GuideType",
    "KvseekError",
    "OutputPiece",
    "Prefix",
    "RequestError",
    "RequestOutput",
    "RowReport",
    "SamplingParams",
    "SelectedRows",
    "Session",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "ConfigError": "core.errors",
    "EndedSession": "core.request",
    "GenerationError": "generation",
    "Guide": "core.guide",
    "GuideType": "core.guide",
    "KvseekError": "core.errors",
    "OutputPiece": "outputs",
    "Prefix": "prefix",
    "RequestError": "core.errors",
    "RequestOutput": "outputs",
    "RowReport": "core.selected_rows",
    "SamplingParams": "sampling_params",
    "SelectedRows": "core.selected_rows",
    "Session": "core.request",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("kvseek")
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"kvseek.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'kvseek' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, those that are not imported yet included."""
    return sorted({*globals(), *__all__})
