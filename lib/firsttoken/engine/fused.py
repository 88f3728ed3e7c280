"""The same decoder in fewer and larger operations (CPU): what vLLM's own model definitions do, for the model given."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from firsttoken.engine.attention import Attend, cache_layer, interface
from firsttoken.engine.linear8 import Linear8
from firsttoken.engine.native.exports import PRODUCTS
from firsttoken.engine.native.library import NAMES, Halves, NativeLinear, kernels, multiplies

_LLAMA, _QWEN2 = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2"))
_LEAN = "firsttoken.lean.layers"
_LAYERS = {(_LLAMA, "LlamaDecoderLayer"), (_QWEN2, "Qwen2DecoderLayer"), (_LEAN, "LeanLayer")}
_NORMS = {(_LLAMA, "LlamaRMSNorm"), (_QWEN2, "Qwen2RMSNorm"), (_LEAN, "RMSNorm")}
_SILU = {("transformers.activations", "SiLUActivation"), ("torch.nn.modules.activation", "SiLU")}
"""By module and name, as to import the stock classes takes seconds."""


_FIELDS, _OF_ADAPTER = 10, 5  # of a weight, as kernels.cpp reads them, and how many of these are its adapter's
_OF_WEIGHTS = np.array([True] * 3 + ([True] * (_FIELDS - _OF_ADAPTER) + [False] * _OF_ADAPTER) * 4)


class PackedLinear(nn.Module):
    """``linear`` with its weight in the layout that oneDNN multiplies with, made once instead of in every step (CPU).

    The original may be freed. Measured with SmolLM2-135M on 2 cores: all matrix products of a decode step of 16
    requests take 25 ms instead of 41 in bf16; what vLLM does on a CPU too. Prefills of 500 tokens gain nothing.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def __deepcopy__(self, memo: dict[int, object]) -> PackedLinear:
        """Itself: nothing writes to its weight, whose memory is oneDNN's own."""
        return self

    def forward(self, states: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")

    def plus(self, states: Tensor, other: Tensor) -> Tensor:
        """The product, and ``other`` [..., out_features] added to it."""
        return torch.ops.mkldnn._linear_pointwise(states, other, self.packed, self.bias, "add")


def packs(linear: nn.Module) -> bool:
    """Whether this is a plain ``nn.Linear`` that oneDNN can pack: torch has it, and this CPU multiplies the dtype."""
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    dtype = linear.weight.dtype
    half = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return half[dtype]() if dtype in half else dtype == torch.float32


class FusedLayer(nn.Module):
    """``stock`` (or lean) as a layer of four matrix products: queries, keys and values by one, gate and up by one.

    ``panels`` are the weights of its products by name, where somebody has packed them; ``stock`` has the rest then."""

    def __init__(self, stock: nn.Module, panels: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__()
        attention, mlp = stock.self_attn, stock.mlp
        self.kv_heads = attention.k_proj.out_features // attention.head_dim
        gate_up = mlp.gate_proj, mlp.up_proj
        if panels is None:
            self.joint = _product(attention.q_proj, attention.k_proj, attention.v_proj)
            self.out = _product(attention.o_proj)
            self.gate_up = NativeLinear(gate_up, gated=True) if all(map(multiplies, gate_up)) else _Gated(*gate_up)
            self.down = _product(mlp.down_proj)
        else:
            for name, paths in PRODUCTS.items():
                linears = [stock.get_submodule(path) for path in paths]
                setattr(self, name, NativeLinear(linears, gated=name == "gate_up", panels=panels[name]))
        self.before_attention, self.before_mlp = _own(stock.input_layernorm), _own(stock.post_attention_layernorm)
        self.attention = copy.copy(attention)  # what attention functions ask for the layer's number and the like
        self.attention._modules = {}
        self.kind: tuple[float, ...] | None = None
        self._describe()

    def _describe(self) -> None:
        """What the kernels must know to run it in one call with others of its ``kind``."""
        norms, products = (self.before_attention, self.before_mlp), (self.joint, self.out, self.gate_up, self.down)
        if not all(type(product) is NativeLinear for product in products):
            return
        if norms[0].variance_epsilon != norms[1].variance_epsilon:
            return
        pointers = [[norm.weight.data_ptr() for norm in norms], *(product.fields for product in products)]
        self.fields = np.concatenate([[cache_layer(self.attention)], *pointers])
        sizes = [size for product in products for size in (product.in_features, product.out_features)]
        self.kind = (*sizes, self.attention.head_dim, self.attention.scaling, norms[0].variance_epsilon)

    def with_adapter(self, slices: Mapping[str, Halves]) -> FusedLayer | None:
        """The same over the same weights with LoRA's ``slices`` by module, "self_attn.q_proj" and so on; None where the
        kernels do not add them up."""
        twin = copy.copy(self)
        twin._modules = dict(self._modules)
        known = 0
        for name, paths in PRODUCTS.items():
            product, halves = getattr(self, name), [slices.get(path) for path in paths]
            adapted = product.with_adapter(halves) if type(product) is NativeLinear else None
            if adapted is None:
                return None
            twin._modules[name] = adapted
            known += sum(pair is not None for pair in halves)
        if known != len(slices):
            return None
        twin._describe()
        return twin

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **keywords: Any,
    ) -> Tensor:
        """[batch, tokens, hidden] -> the same, as the stock layer."""
        native, module = kernels(), self.attention
        batch, tokens, _ = hidden_states.shape
        states = self.joint(normed(hidden_states, self.before_attention)).view(batch * tokens, -1, module.head_dim)
        cos, sin = (half.expand(batch, -1, -1).reshape(batch * tokens, -1) for half in position_embeddings)
        native.rotate(states[:, : -self.kv_heads], cos, sin)
        heads = states.view(batch, tokens, -1, module.head_dim).transpose(1, 2)
        query, key, value = heads.tensor_split((-2 * self.kv_heads, -self.kv_heads), 1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        seen, _ = interface(module)(
            module, query, key, value, attention_mask, dropout=0.0, scaling=module.scaling, **keywords
        )
        hidden_states = self.out.plus(seen.reshape(batch, tokens, -1), hidden_states)
        return self.down.plus(self.gate_up(normed(hidden_states, self.before_mlp)), hidden_states)


class _Gated(nn.Module):
    """silu(gate) * up of two linear layers, by one product."""

    def __init__(self, gate: nn.Linear | Linear8, up: nn.Linear | Linear8) -> None:
        super().__init__()
        self.both = _product(gate, up)

    def forward(self, states: Tensor) -> Tensor:
        return kernels().gated(self.both(states))


class JoinedLayers(NamedTuple):
    """``layers``, of which the first ``count`` are fused and alike, so that the kernels can run them in one call; and
    the ``fields`` [1, count, fields] of these."""

    layers: list[nn.Module]
    count: int
    fields: np.ndarray

    @classmethod
    def of(cls, layers: list[nn.Module]) -> JoinedLayers:
        """Count and join them."""
        kind = getattr(layers[0], "kind", None)
        alike = (type(layer) is FusedLayer and kind is not None and layer.kind == kind for layer in layers)
        count = next((i for i, same in enumerate(alike) if not same), len(layers))
        return cls(layers, count, np.array([[layer.fields for layer in layers[:count]]]))


def run_together(joined: JoinedLayers, hidden: Tensor, paged: Attend, turns: tuple[Tensor, Tensor] | None) -> int:
    """How many of the ``joined`` layers, from the first on, one call of the kernels runs over ``hidden``
    [1, tokens, hidden].

    ``paged``, the step's attention, must read all of its tokens by the kernels; ``turns`` are the cosines and sines of
    its positions.
    """
    if not joined.count or turns is None or paged.read_by_kernels(hidden.shape[1]) is None:
        return 0
    same = hidden.dtype == paged.pool.shape.dtype == joined.layers[0].joint.panels.dtype
    return joined.count if same else 0


def layer_table(variants: Sequence[Sequence[nn.Module]]) -> np.ndarray | None:
    """The fields [variants, layers, fields] of layers that one call of the kernels can run.

    None where it cannot: one of them is not fused, or they do not have the same weights.
    """
    layers = [layer for mine in variants for layer in mine]
    if any(type(layer) is not FusedLayer or layer.kind is None or layer.kind != layers[0].kind for layer in layers):
        return None
    fields = np.stack([[layer.fields for layer in mine] for mine in variants])
    weights = fields[..., _OF_WEIGHTS]
    return fields if (weights == weights[:1]).all() else None


def run_layers(
    layers: Sequence[FusedLayer],
    hidden: Tensor,
    paged: Attend,
    turns: tuple[Tensor, Tensor],
    fields: np.ndarray,
    variant_of: Tensor | None = None,
) -> Tensor:
    """``hidden`` [1, tokens, hidden] through ``layers``, which :func:`run_together` has counted -> the same shape.

    ``fields`` [variants, layers, fields] are theirs. Each token goes through those of its own variant, if there are
    several: ``variant_of``, int64 [tokens], says whose a token is.
    """
    first, states = layers[0], hidden[0].clone(memory_format=torch.contiguous_format)
    room = first.joint.in_features + first.joint.out_features + first.out.in_features + first.down.in_features
    kernels().run_layers(
        fields,
        variant_of,
        states,
        tuple(half[0].contiguous() for half in turns),
        paged.pool.rows,
        *paged.read_by_kernels(len(states)),
        room,
        first.before_attention.variance_epsilon,
        first.attention.scaling,
    )
    return states[None]


def fuse(model: nn.Module) -> nn.Module:
    """Fuse the layers of a Llama or Qwen2 ``model`` in place, and pack its other linear layers; returns the model.

    It can then only be run: not saved, copied or trained, nor asked for hidden states and attentions on the way. What
    cannot be replaced stays as it is: everything on another device than the CPU, where torch was built without oneDNN,
    or for a dtype that this CPU does not multiply; layers whose projections carry a PEFT adapter. Without the kernels,
    linear layers are packed and nothing is fused.
    """
    with torch.no_grad():
        _replace(model)
    return model


def fuse_layer(layer: nn.Module) -> nn.Module:
    """One decoder layer as it arrives: fused, and itself as it was; one that cannot be is packed in place."""
    with torch.no_grad():
        if fuses(layer):
            return FusedLayer(layer)
        _replace(layer)
    return layer


def _replace(parent: nn.Module) -> None:
    if isinstance(parent, nn.ModuleDict):  # where PEFT keeps the factors of an adapter, whose weights it looks at
        return
    for name, child in list(parent.named_children()):
        if fuses(child):
            setattr(parent, name, FusedLayer(child))
        elif packs(child):
            setattr(parent, name, packed(child))
        else:
            _replace(child)


def fuses(layer: nn.Module) -> bool:
    """Whether :func:`fuse_layer` makes a :class:`FusedLayer` of ``layer``, and leaves that as it was."""
    if _kind(layer) not in _LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    coded = all(isinstance(linear, Linear8) for linear in linears)
    if not (coded or all(map(packs, linears))) or not all(_kind(norm) in _NORMS for norm in norms):
        return False
    dtypes = {part.weight.dtype for part in (norms if coded else linears + norms)}
    return (
        len(dtypes) == 1
        and dtypes <= NAMES.keys()
        and _kind(mlp.act_fn) in _SILU
        and getattr(attention, "sliding_window", None) is None
        and kernels() is not None
    )


def _kind(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def normed(states: Tensor, norm: nn.Module) -> Tensor:
    """What ``norm``, a root-mean-square norm of Llama's kind, makes of ``states``, by the kernels."""
    return kernels().rms_norm(states.contiguous(), norm.weight, norm.variance_epsilon)


def _own(norm: nn.Module) -> nn.Module:
    """``norm`` with memory of its own: where a whole layer lies in one buffer, a part of it would keep all of it."""
    own = copy.copy(norm)
    own._parameters = {"weight": nn.Parameter(norm.weight.detach().clone(), requires_grad=False)}
    return own


def packed(linear: nn.Linear) -> NativeLinear | PackedLinear:
    """``linear``, one that :func:`packs` says yes to, with its weight in the layout that is multiplied fastest here."""
    return NativeLinear([linear]) if multiplies(linear) else PackedLinear(linear)


def _product(*linears: nn.Linear | Linear8) -> NativeLinear | PackedLinear | Linear8:
    """One layer whose outputs are those of ``linears``, one after the other."""
    if isinstance(linears[0], Linear8):
        return Linear8.joined(linears)
    if all(map(multiplies, linears)):
        return NativeLinear(linears)
    return PackedLinear(linears[0] if len(linears) == 1 else _stacked(linears))


def _stacked(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer whose outputs are those of ``linears``, one after the other."""
    weight = torch.cat([linear.weight for linear in linears])
    joint = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    biases = [linear.bias for linear in linears]
    joint.bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
    return joint
