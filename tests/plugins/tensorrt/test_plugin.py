"""The attention plugin in TensorRT for RTX's own plugin classes: registry, fields, phases, and what it refuses by name."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tensorrt_stand_ins import PluginNetwork, stand_in_tensorrt

from kvseek.builder.tensorrt.graph import Graph
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.model_config import ModelConfig
from kvseek.core.tensorrt_api import logger
from kvseek.plugins.tensorrt.fields import AttentionFields
from kvseek.plugins.tensorrt.plugin import NAME, NAMESPACE, VERSION, add_attention_layer, register

api = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13")

FIELDS = AttentionFields(layer=5, num_heads=6, num_kv_heads=2, head_dim=32, dtype="bfloat16")
NUMBERS = {"layer": 5, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
SHAPES = ((7, 6, 32), (7, 2, 32), (7, 2, 32), (7, 6, 32))
MODEL = ModelConfig("llama", 100, 192, 128, 2, 6, 2, 32, 1e-5, 1e4, 128)


def make(phase: str = "BUILD", fields: AttentionFields = FIELDS) -> Any:
    packed = fields.packed(api)
    return register(api).create_plugin("attention", packed.collection, getattr(api.TensorRTPhase, phase))


def description(shape: tuple[int, ...], kind: str = "BF16", layout: str = "LINEAR") -> Any:
    made = api.PluginTensorDesc()
    made.dims, made.type, made.format = api.Dims(shape), getattr(api.DataType, kind), getattr(api.TensorFormat, layout)
    return made


def dynamic(found: Any) -> Any:
    made = api.DynamicPluginTensorDesc()
    made.desc = found
    return made


def descriptions(changed: int | None = None, **change: Any) -> list[Any]:
    """Of the inputs and the output; that of number `changed` with other properties."""
    values: list[dict[str, Any]] = [{"shape": shape} for shape in SHAPES]
    if changed is not None:
        values[changed] |= change
    return [description(**value) for value in values]


def test_the_registry_has_the_creator() -> None:
    creator = register(api)
    assert api.get_plugin_registry().get_creator(NAME, VERSION, NAMESPACE) is creator
    assert (
        api.get_builder_plugin_registry(api.EngineCapability.STANDARD).get_creator(NAME, VERSION, NAMESPACE) is creator
    )
    assert register(api) is creator
    assert (creator.name, creator.plugin_version, creator.plugin_namespace) == ("KvseekAttention", "1", "kvseek")
    assert [(field.name, field.type.name) for field in creator.field_names] == [
        *((name, "INT32") for name in NUMBERS),
        ("dtype", "CHAR"),
    ]


def test_another_creator_of_its_name_is_an_error() -> None:
    other = stand_in_tensorrt()
    taken = type("Other", (), {"name": NAME, "plugin_version": VERSION})()
    assert other.get_plugin_registry().register_creator(taken, NAMESPACE)
    with pytest.raises(
        KernelError, match="plugin KvseekAttention 1 of namespace 'kvseek' is refused by tensorrt stand-in"
    ):
        register(other)


def test_tensorrt_without_such_plugins_is_an_error() -> None:
    old: Any = ModuleType("tensorrt")
    old.__version__ = "8.6"
    with pytest.raises(KernelError, match=r"tensorrt 8\.6 lacks IPluginV3 .*docs/tensorrt\.md"):
        register(old)


def test_a_plugin_goes_through_its_fields() -> None:
    """Through what a plan stores: names, types and bytes, read when the first plugin and its arrays are long gone."""
    built = make()
    stored = [(field.name, field.type.name, bytes(field.data)) for field in built.get_fields_to_serialize()]
    number = [(name, "INT32", value.to_bytes(4, "little")) for name, value in NUMBERS.items()]
    assert stored == [*number, ("dtype", "CHAR", b"bfloat16")]
    restored = register(api).create_plugin("attention", built.get_fields_to_serialize(), api.TensorRTPhase.RUNTIME)
    del built
    again = make("RUNTIME", restored.fields)
    assert restored.fields == again.fields == FIELDS
    assert not restored.building


def test_fields_outlive_what_made_them() -> None:
    """A collection copies addresses: the names and numbers of many plugins stay theirs."""
    made = [make(fields=AttentionFields(layer, 6, 2, 32, "float16")) for layer in range(40)]
    for layer, plugin in enumerate(made):
        fields = {field.name: bytes(field.data) for field in plugin.get_fields_to_serialize()}
        assert fields["layer"] == layer.to_bytes(4, "little")
        assert fields["dtype"] == b"float16"
    assert [field.name for field in register(api).field_names] == [*NUMBERS, "dtype"]


@pytest.mark.parametrize("phase", ["BUILD", "RUNTIME"])
def test_copies_are_the_same(phase: str) -> None:
    plugin = make(phase)
    for copy in (plugin.clone(), plugin.attach_to_context(None), plugin.clone().clone()):
        assert copy is not plugin
        assert (copy.fields, copy.building) == (FIELDS, phase == "BUILD")
        assert (copy.plugin_name, copy.plugin_version, copy.plugin_namespace) == (NAME, VERSION, NAMESPACE)
        assert copy.num_outputs == 1
        assert isinstance(copy, (api.IPluginV3, api.IPluginV3OneCore))
        for kind in ("CORE", "BUILD", "RUNTIME"):
            assert copy.get_capability_interface(getattr(api.PluginCapabilityType, kind)) is copy


def collection(values: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A collection of fields, INT32 for arrays of int32 and CHAR for others, and what must stay alive for it."""
    kinds = api.PluginFieldType
    fields = [
        api.PluginField(name, value, kinds.INT32 if value.dtype == np.int32 else kinds.CHAR)
        for name, value in values.items()
    ]
    return api.PluginFieldCollection(fields), fields


def text(value: str) -> Any:
    return np.frombuffer(value.encode(), np.int8).copy()


def numbers(*values: int) -> Any:
    return np.array(values, np.int32)


WRONG = [
    ({"layer": None}, "attention plugin's layer is missing: its fields are layer, num_heads"),
    ({"scale": numbers(1)}, "attention plugin's scale is unknown"),
    ({"num_heads": text("six")}, "type of attention plugin's num_heads = 'CHAR': must be INT32"),
    ({"dtype": numbers(1)}, "type of attention plugin's dtype = 'INT32': must be CHAR"),
    ({"head_dim": numbers(32, 64)}, "size of attention plugin's head_dim = 2: must be 1"),
    ({"dtype": text("float64")}, "attention plugin's dtype = 'float64': must be one of"),
    ({"num_kv_heads": numbers(4)}, "num_kv_heads = 4: must be a divisor of num_heads = 6; build the engine again"),
    ({"head_dim": numbers(0)}, "head_dim = 0: must be >= 1"),
    ({"layer": numbers(-1)}, "layer = -1: must be >= 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_fields_are_refused(change: dict[str, Any], message: str) -> None:
    values = {name: numbers(value) for name, value in NUMBERS.items()} | {"dtype": text("bfloat16")} | change
    fields, kept = collection({name: value for name, value in values.items() if value is not None})
    assert len(kept) == len(fields)
    with pytest.raises(ConfigError, match=message):
        register(api).create_plugin("attention", fields, api.TensorRTPhase.RUNTIME)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "FLOAT"), ("bfloat16", "BF16"), ("float16", "HALF")])
def test_types_and_formats(dtype: str, kind: str) -> None:
    plugin = make(fields=AttentionFields(0, 6, 2, 32, dtype))
    own = getattr(api.DataType, kind)
    assert plugin.get_output_data_types([own] * 3) == [own]
    with pytest.raises(ConfigError, match=f"dtype of values of layer 0 = 'INT8': must be {kind}"):
        plugin.get_output_data_types([own, own, api.DataType.INT8])
    with pytest.raises(ConfigError, match="inputs = 2: must be 3: queries, keys, values"):
        plugin.get_output_data_types([own] * 2)
    assert plugin.get_workspace_size([], []) == 0
    found = [dynamic(description(shape, kind)) for shape in SHAPES]
    assert all(plugin.supports_format_combination(position, found, 3) is True for position in range(4))
    for position in range(4):
        for other in (description(SHAPES[position], "INT32"), description(SHAPES[position], kind, "CHW2")):
            changed = [*found[:position], dynamic(other), *found[position + 1 :]]
            assert plugin.supports_format_combination(position, changed, 3) is False


def test_output_shape_is_that_of_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In TensorRT's expressions, which cannot be made outside of a build: they are passed on as they are."""
    plugin = make()
    (real,) = plugin.get_output_shapes([api.DimsExprs(3)] * 3, [], None)
    assert isinstance(real, api.DimsExprs)
    assert len(real) == 3
    monkeypatch.setattr(type(plugin), "api", type("Api", (), {"DimsExprs": list}))
    assert plugin.get_output_shapes([["T", "H", "D"], ["T", "G", "D"], ["T", "G", "D"]], [], None) == [["T", "H", "D"]]
    with pytest.raises(ConfigError, match="rank of keys = 2: must be 3"):
        plugin.get_output_shapes([["T", "H", "D"], ["T", "D"], ["T", "G", "D"]], [], None)
    with pytest.raises(ConfigError, match="shape inputs = 1: must be none"):
        plugin.get_output_shapes([["T", "H", "D"]] * 3, [["R"]], None)


MISFITS = [
    (0, {"shape": (7, 6, 64)}, r"shape of queries of layer 5 = \(7, 6, 64\): must be \(7, 6, 32\)"),
    (1, {"shape": (8, 2, 32)}, r"shape of keys of layer 5 = \(8, 2, 32\): must be \(7, 2, 32\)"),
    (2, {"shape": (7, 6, 32)}, r"shape of values of layer 5 = \(7, 6, 32\): must be \(7, 2, 32\)"),
    (
        3,
        {"shape": (7, 2, 32)},
        r"shape of attended of layer 5 = \(7, 2, 32\): must be \(7, 6, 32\); the plan is of another",
    ),
    (1, {"kind": "HALF"}, "dtype of keys of layer 5 = 'HALF': must be BF16"),
    (2, {"layout": "CHW2"}, "format of values of layer 5 = 'CHW2': must be LINEAR"),
]


@pytest.mark.parametrize(("number", "change", "message"), MISFITS)
def test_misfits_are_refused_by_name(number: int, change: dict[str, Any], message: str) -> None:
    plugin, wrong = make(), descriptions(number, **change)
    with pytest.raises(ConfigError, match=message):
        plugin.on_shape_change(wrong[:3], wrong[3:])
    with pytest.raises(ConfigError, match=message):
        plugin.configure_plugin([dynamic(x) for x in wrong[:3]], [dynamic(x) for x in wrong[3:]])


def test_what_fits_is_accepted() -> None:
    plugin, fitting = make(), descriptions()
    plugin.on_shape_change(fitting[:3], fitting[3:])
    open_ended = [dynamic(description((-1, *shape[1:]))) for shape in SHAPES]
    plugin.configure_plugin(open_ended[:3], open_ended[3:])


def graph(dtype: torch.dtype, plugins: bool = True) -> tuple[Graph, Any, Any]:
    """An empty network with plugin layers, unless not, its graph, and the builder that it needs."""
    builder = api.Builder(logger(api))
    plain = builder.create_network(1 << int(api.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    plain.name = "decoder"
    network = PluginNetwork(api, plain) if plugins else plain
    return Graph(api, network, dtype, torch.zeros), network, builder


def add(own: Graph, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Any:
    names = ("queries", "keys", "values")
    inputs = [
        own.input(name, own.dtype, (-1, *shape[1:]), "tokens") for name, shape in zip(names, shapes, strict=False)
    ]
    return add_attention_layer(own, 5, *inputs, MODEL)


def test_an_attention_layer_of_a_network() -> None:
    own, network, _builder = graph(torch.bfloat16)
    out = add(own)
    assert tuple(out.shape) == (-1, 6, 32)
    ((layer, inputs, plugin),) = network.plugins
    assert layer.name == "layers.5.attention"
    assert inputs == [(-1, *shape[1:]) for shape in SHAPES[:3]]
    assert (plugin.fields, plugin.building) == (FIELDS, True)


def test_a_dtype_that_attention_has_not() -> None:
    own, _network, _builder = graph(torch.int32)
    with pytest.raises(ConfigError, match="attention plugin's dtype = 'int32'"):
        add(own)


def test_a_network_without_plugin_layers() -> None:
    own, _network, _builder = graph(torch.bfloat16, plugins=False)
    with pytest.raises(
        KernelError, match=r"layers\.5\.attention of network 'decoder': tensorrt_rtx 1.* has no plugin layers"
    ):
        add(own)


def test_a_layer_that_tensorrt_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    own, network, _builder = graph(torch.bfloat16)
    monkeypatch.setattr(PluginNetwork, "add_plugin_v3", lambda *arguments: None)
    with pytest.raises(
        KernelError, match=r"layer layers\.5\.attention of network 'decoder' is refused by tensorrt_rtx"
    ):
        add(own)
    assert network.plugins == []
