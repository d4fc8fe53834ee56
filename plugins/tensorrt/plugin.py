"""Attention as a layer of a TensorRT plan: an IPluginV3 that hands its tensors to the function that serves the plan.

The layer has no attention of its own. When TensorRT enqueues it, it calls the function that `serving` was given, so one plan
serves every method. TensorRT is never imported here: all functions take its module, `tensorrt` or `tensorrt_rtx`, whose
plugin classes are the same in `tensorrt` 10.13 and 11.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch

from kvseek.core.errors import KernelError, require
from kvseek.core.model_config import ModelConfig

from .fields import AttentionFields, field_names
from .serving import Call, current_call, serving
from .tensors import ELEMENTS, device_tensor

__all__ = ["NAME", "NAMESPACE", "VERSION", "add_attention_layer", "register", "serving"]

NAME, VERSION, NAMESPACE = "KvseekAttention", "1", "kvseek"
TENSORS = ("queries", "keys", "values", "attended")  # three inputs and the output
INPUTS = 3
INSTALL = "install a version that docs/tensorrt.md names"
MISFIT = "the plan is of another model: build the engine again"


class PluginGraph(Protocol):
    """The part of Graph (builder/tensorrt/graph.py) that is needed here."""

    api: Any
    dtype: torch.dtype

    def plugin(self, inputs: Sequence[Any], plugin: Any, name: str) -> Any: ...


class AttentionPlugin:
    """The plugin, with all of its capabilities. Subclasses of it also derive from TensorRT's classes.

    Parameters
    ----------
    building : bool
        Whether the plugin belongs to a network that is being built, which TensorRT may time with meaningless buffers.
    """

    api: ClassVar[Any]
    bases: ClassVar[tuple[Any, ...]]

    def __init__(self, fields: AttentionFields, building: bool) -> None:
        # The bindings' constructors do not call each other, and an object that lacks one crashes the process later.
        for base in self.bases:
            base.__init__(self)
        self.fields, self.building = fields, building
        self.num_outputs = 1
        self.plugin_name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        self._packed = fields.packed(self.api)

    def get_capability_interface(self, type: Any) -> AttentionPlugin:
        """Return the plugin itself, which has all capabilities."""
        return self

    def clone(self) -> AttentionPlugin:
        """Make another plugin with the same fields and phase."""
        return self.__class__(self.fields, self.building)

    def attach_to_context(self, resource_context: Any) -> AttentionPlugin:
        """Make the plugin of an execution context: a clone, because it uses no resources of the context."""
        return self.clone()

    def get_fields_to_serialize(self) -> Any:
        """Return the fields of which the creator makes the same plugin when a plan is loaded."""
        return self._packed.collection

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        """Return the dtype of the fields; raises ConfigError if an input has another dtype."""
        self._require_inputs(len(input_types))
        for name, found in zip(TENSORS, input_types, strict=False):
            self._require_type(name, found)
        return [self._type]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
        """Return the queries' shape, in TensorRT's expressions; raises ConfigError unless there are three inputs of rank 3."""
        self._require_inputs(len(inputs))
        require(len(shape_inputs) == 0, "attention plugin's shape inputs", len(shape_inputs), "none", MISFIT)
        for name, shape in zip(TENSORS, inputs, strict=False):
            require(len(shape) == 3, f"rank of {name}", len(shape), "3", MISFIT)
        return [self.api.DimsExprs([inputs[0][axis] for axis in range(3)])]

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        """Whether a tensor is contiguous and has the fields' dtype; no others are supported."""
        found = in_out[pos].desc
        return bool(found.format == self.api.TensorFormat.LINEAR and found.type == self._type)

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check the network's tensors, in whose shapes the number of tokens may be -1; raises ConfigError."""
        self._check([tensor.desc for tensor in (*inputs, *outputs)])

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check the tensors of the next calls; raises ConfigError."""
        self._check([*inputs, *outputs])

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Return 0, because the function that attends has memory of its own."""
        return 0

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Have `serving`'s function attend on TensorRT's stream; an exception makes TensorRT's execution fail.

        Raises
        ------
        KernelError
            If the plugin runs outside of `serving`.
        """
        call = current_call()
        if call is not None:
            self._attend(call, [*input_desc, *output_desc], [*inputs, *outputs], stream)
        elif not self.building:
            raise KernelError(
                f"attention of layer {self.fields.layer} is enqueued outside of serving(): run the plan within "
                "kvseek.plugins.tensorrt.serving, in the thread that enqueues it"
            )
        # While a builder times its layers, nobody reads results, and there are no rows to attend to.

    def _attend(self, call: Call, descriptions: Sequence[Any], pointers: Sequence[int], stream: int) -> None:
        queries, keys, values, out = (
            device_tensor(pointer, tuple(description.dims), self.fields.dtype)
            for pointer, description in zip(pointers, descriptions, strict=True)
        )
        own = torch.cuda.ExternalStream(stream, device=queries.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            call.attend(self.fields.layer, queries, keys, values, out)

    @property
    def _type(self) -> Any:
        return getattr(self.api.DataType, ELEMENTS[self.fields.dtype].tensorrt)

    def _check(self, descriptions: Sequence[Any]) -> None:
        """Raise ConfigError unless shapes, types and formats of the inputs and the output are the fields'."""
        self._require_inputs(len(descriptions) - 1)
        fields, tokens = self.fields, descriptions[0].dims[0]
        heads = (fields.num_heads, fields.num_kv_heads, fields.num_kv_heads, fields.num_heads)
        for name, count, found in zip(TENSORS, heads, descriptions, strict=True):
            shape, limit = tuple(found.dims), (tokens, count, fields.head_dim)
            require(shape == limit, f"shape of {name} of layer {fields.layer}", shape, str(limit), MISFIT)
            self._require_type(name, found.type)
            linear = found.format == self.api.TensorFormat.LINEAR
            require(linear, f"format of {name} of layer {fields.layer}", found.format.name, "LINEAR", MISFIT)

    def _require_inputs(self, count: int) -> None:
        require(count == INPUTS, "attention plugin's inputs", count, f"{INPUTS}: {', '.join(TENSORS[:INPUTS])}", MISFIT)

    def _require_type(self, name: str, found: Any) -> None:
        limit = self._type.name
        require(found == self._type, f"dtype of {name} of layer {self.fields.layer}", found.name, limit, MISFIT)


class AttentionCreator:
    """Makes plugins from their fields. Subclasses of it also derive from TensorRT's IPluginCreatorV3One."""

    plugin_class: ClassVar[type[AttentionPlugin]]

    def __init__(self) -> None:
        api = self.plugin_class.api
        api.IPluginCreatorV3One.__init__(self)
        # All four attributes must be set: the bindings crash the process when the registry asks for a missing one.
        self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        self._packed = field_names(api)
        self.field_names = self._packed.collection

    def create_plugin(self, name: str, field_collection: Iterable[Any], phase: Any) -> AttentionPlugin:
        """Make a plugin for a network that is built, or of a plan that is loaded; raises ConfigError on wrong fields."""
        api = self.plugin_class.api
        return self.plugin_class(AttentionFields.read(api, field_collection), phase == api.TensorRTPhase.BUILD)


def _make_creator(api: Any) -> AttentionCreator:
    """Make a creator; its class and the class of its plugins derive from the classes of `api`."""
    bases = (api.IPluginV3, api.IPluginV3OneCore, api.IPluginV3OneBuild, api.IPluginV3OneRuntime)
    plugin = type("KvseekAttentionPlugin", (AttentionPlugin, *bases), {"api": api, "bases": bases})
    parents = (AttentionCreator, api.IPluginCreatorV3One)
    creator: Any = type("KvseekAttentionCreator", parents, {"plugin_class": plugin})()
    return cast(AttentionCreator, creator)


@functools.cache
def register(api: Any) -> AttentionCreator:
    """Register the plugin with TensorRT, once a process, before a plan with the plugin is built or loaded.

    Parameters
    ----------
    api : module
        `tensorrt` or `tensorrt_rtx`.

    Returns
    -------
    AttentionCreator
        The registered creator.

    Raises
    ------
    KernelError
        If the module has no such plugins, or the registry refuses the creator.
    """
    try:
        creator, registry = _make_creator(api), api.get_plugin_registry()
    except AttributeError as error:
        raise KernelError(f"{api.__name__} {api.__version__} lacks IPluginV3 ({error}); {INSTALL}") from None
    if not registry.register_creator(creator, NAMESPACE):
        raise KernelError(
            f"plugin {NAME} {VERSION} of namespace {NAMESPACE!r} is refused by {api.__name__} {api.__version__}: "
            "another creator has its name; unload the library that registers it"
        )
    return creator


def add_attention_layer(
    graph: PluginGraph, layer: int, queries: Any, keys: Any, values: Any, model: ModelConfig
) -> Any:
    """Add attention of a layer to a network.

    Parameters
    ----------
    graph : PluginGraph
        The network, in float32, bfloat16 or float16.
    queries, keys, values : ITensor
        [tokens, H, D] and [tokens, G, D], rotated.

    Returns
    -------
    ITensor
        Attention's output, [tokens, H, D].

    Raises
    ------
    ConfigError
        If the network's dtype is another.
    KernelError
        If TensorRT has no plugin layers, or refuses this layer.
    """
    creator, dtype = register(graph.api), str(graph.dtype).removeprefix("torch.")
    fields = AttentionFields(layer, model.num_heads, model.num_kv_heads, model.head_dim, dtype)
    name = f"layers.{layer}.attention"
    packed = fields.packed(graph.api)
    plugin = creator.create_plugin(name, packed.collection, graph.api.TensorRTPhase.BUILD)
    return graph.plugin((queries, keys, values), plugin, name)
