"""Stand-ins for TensorRT where it is not: its documented plugin classes, and an INetworkDefinition with plugin layers."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any


class DataType(enum.Enum):
    FLOAT, HALF, INT8, INT32, BF16 = 0, 1, 2, 3, 7


class TensorFormat(enum.Enum):
    LINEAR, CHW2 = 0, 1


class PluginFieldType(enum.Enum):
    FLOAT32, INT32, CHAR = 1, 5, 6


class TensorRTPhase(enum.Enum):
    BUILD, RUNTIME = 0, 1


class PluginCapabilityType(enum.Enum):
    CORE, BUILD, RUNTIME = 0, 1, 2


def base(name: str) -> type:
    """A class that notes that its constructor was called for an object."""

    def construct(self: Any) -> None:
        self.__dict__.setdefault("constructed", set()).add(name)

    return type(name, (), {"__init__": construct})


class PluginField:
    def __init__(self, name: str, data: Any, type: PluginFieldType) -> None:
        self.name, self.data, self.type, self.size = name, data, type, len(data)


class Registry:
    """IPluginRegistry: refuses a second creator of a name, version and namespace."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        key = (creator.name, creator.plugin_version, plugin_namespace)
        return self.creators.setdefault(key, creator) is creator

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self.creators.get((type, version, plugin_namespace))


class PluginTensorDesc:
    def __init__(self, dims: tuple[int, ...], type: Any, format: Any = TensorFormat.LINEAR) -> None:
        self.dims, self.type, self.format = dims, type, format


def stand_in_tensorrt() -> Any:
    """A module with the plugin classes that `tensorrt` 10.13 and 11 document, and nothing else."""
    api: Any = ModuleType("tensorrt")
    registry = Registry()
    api.__version__ = "stand-in"
    api.get_plugin_registry = lambda: registry
    api.PluginFieldCollection = api.DimsExprs = list
    for name in ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime", "IPluginCreatorV3One"):
        setattr(api, name, base(name))
    for kind in (DataType, TensorFormat, PluginFieldType, TensorRTPhase, PluginCapabilityType, PluginField):
        setattr(api, kind.__name__, kind)
    return api


class PluginNetwork:
    """A network of `api` with add_plugin_v3: it asks the plugin what TensorRT would, and passes the first input on.

    The rest of INetworkDefinition is the network's own. `plugins` lists (layer, inputs, plugin).
    """

    def __init__(self, api: Any, network: Any) -> None:
        self.__dict__.update(api=api, network=network, plugins=[])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.network, name, value)

    def add_plugin_v3(self, inputs: list[Any], shape_inputs: list[Any], plugin: Any) -> Any:
        assert plugin.get_output_data_types([tensor.dtype for tensor in inputs]) == [inputs[0].dtype]
        exprs = self.api.DimsExprs(3)
        assert len(plugin.get_output_shapes([exprs] * len(inputs), shape_inputs, None)) == plugin.num_outputs
        layer = self.network.add_identity(inputs[0])
        self.plugins.append((layer, [tuple(tensor.shape) for tensor in inputs], plugin))
        return layer


def with_plugin_layers(api: Any, name: str = "tensorrt", version: str = "10.13") -> Any:
    """A module like `api`, of another name, whose networks have plugin layers; `networks` lists those it made."""
    module: Any = ModuleType(name)
    module.__dict__.update({key: value for key, value in vars(api).items() if not key.startswith("__")})
    module.__version__ = version
    module.networks = []
    registry = Registry()  # two modules have two
    module.get_plugin_registry = lambda: registry

    class Builder:
        def __init__(self, logger: Any) -> None:
            self.builder = api.Builder(logger)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.builder, name)

        def create_network(self, flags: int) -> PluginNetwork:
            module.networks.append(PluginNetwork(api, self.builder.create_network(flags)))
            network: PluginNetwork = module.networks[-1]
            return network

        def build_serialized_network(self, network: PluginNetwork, config: Any) -> Any:
            return self.builder.build_serialized_network(network.network, config)

    module.Builder = Builder
    return module
