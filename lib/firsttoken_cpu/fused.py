"""A decoder fused into fewer and larger operations (CPU): what vLLM's own model definitions do, for the model given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firsttoken.engine.accelerator import Fused, LoraPair
from firsttoken.engine.attention import Attend, cache_layer
from firsttoken.engine.linear8 import Linear8
from firsttoken_cpu.lean.layers import LeanAttention
from firsttoken_cpu.native.exports import PRODUCTS, LayerStruct
from firsttoken_cpu.native.library import NAMES, NativeLinear, kernels, multiplies, paged_struct

_LLAMA, _QWEN2 = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2"))
_LEAN = "firsttoken_cpu.lean.layers"
_LAYERS = {(_LLAMA, "LlamaDecoderLayer"), (_QWEN2, "Qwen2DecoderLayer"), (_LEAN, "LeanLayer")}
_NORMS = {(_LLAMA, "LlamaRMSNorm"), (_QWEN2, "Qwen2RMSNorm"), (_LEAN, "RMSNorm")}
_SILU = {("transformers.activations", "SiLUActivation"), ("torch.nn.modules.activation", "SiLU")}
"""By module and name, as to import the stock classes takes seconds."""


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
        """Return this layer itself: nothing writes to its weight, whose memory is oneDNN's own."""
        return self

    def forward(self, states: Tensor) -> Tensor:
        """Multiply ``states`` [..., in_features] -> [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")

    def plus(self, states: Tensor, other: Tensor) -> Tensor:
        """Return the product with ``other`` [..., out_features] added to it."""
        return torch.ops.mkldnn._linear_pointwise(states, other, self.packed, self.bias, "add")


def packs(linear: nn.Module) -> bool:
    """Return whether ``linear`` is a plain ``nn.Linear`` that oneDNN can pack: torch has it, and this CPU multiplies
    the dtype."""
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    dtype = linear.weight.dtype
    half = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return half[dtype]() if dtype in half else dtype == torch.float32


class FusedLayer(Fused):
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
        self.before_attention = _copied(stock.input_layernorm)
        self.before_mlp = _copied(stock.post_attention_layernorm)
        self.attention = copy.copy(attention)  # what attention functions ask for the layer's number and the like
        self.attention._modules = {}
        self.kind: tuple[float, ...] | None = None
        self._describe()

    def _describe(self) -> None:
        """Note what the kernels must know to run it in one call with others of its ``kind``, and where its weights lie,
        which variants share."""
        norms, products = (self.before_attention, self.before_mlp), [getattr(self, name) for name in PRODUCTS]
        if not all(type(product) is NativeLinear for product in products):
            return
        if norms[0].variance_epsilon != norms[1].variance_epsilon:
            return
        pointers = [norm.weight.data_ptr() for norm in norms]
        self.struct = LayerStruct(cache_layer(self.attention), *pointers, *(product.struct for product in products))
        weights = ((product.struct.panels, product.struct.bias) for product in products)
        self.weights = (self.struct.number, *pointers, *weights)
        sizes = [size for product in products for size in (product.in_features, product.out_features)]
        self.kind = (*sizes, self.attention.head_dim, self.attention.scaling, norms[0].variance_epsilon)

    def with_adapter(self, slices: Mapping[str, LoraPair]) -> FusedLayer | None:
        """Return a layer over the same weights with LoRA's ``slices`` by module, "self_attn.q_proj" and so on; None
        where the kernels do not add them up."""
        twin = copy.copy(self)
        twin._modules = dict(self._modules)
        adapted_count = 0
        for name, paths in PRODUCTS.items():
            product, halves = getattr(self, name), [slices.get(path) for path in paths]
            adapted = product.with_adapter(halves) if type(product) is NativeLinear else None
            if adapted is None:
                return None
            twin._modules[name] = adapted
            adapted_count += sum(pair is not None for pair in halves)
        if adapted_count != len(slices):
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
        """Run the layer as the stock one does: [batch, tokens, hidden] -> the same shape."""
        native, module = kernels(), self.attention
        batch, tokens, _ = hidden_states.shape
        states = self.joint(normed(hidden_states, self.before_attention)).view(batch * tokens, -1, module.head_dim)
        cos, sin = (half.expand(batch, -1, -1).reshape(batch * tokens, -1) for half in position_embeddings)
        native.rotate(states[:, : -self.kv_heads], cos, sin)
        heads = states.view(batch, tokens, -1, module.head_dim).transpose(1, 2)
        query, key, value = heads.tensor_split((-2 * self.kv_heads, -self.kv_heads), 1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        attended, _ = _interface(module)(
            module, query, key, value, attention_mask, dropout=0.0, scaling=module.scaling, **keywords
        )
        hidden_states = self.out.plus(attended.reshape(batch, tokens, -1), hidden_states)
        return self.down.plus(self.gate_up(normed(hidden_states, self.before_mlp)), hidden_states)


def _interface(module: nn.Module) -> Callable[..., Any]:
    """The function that an attention ``module``, stock or lean, calls now."""
    if isinstance(module, LeanAttention):
        return module.interface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager_attention_forward)


class _Gated(nn.Module):
    """silu(gate) * up of two linear layers, by one product."""

    def __init__(self, gate: nn.Linear | Linear8, up: nn.Linear | Linear8) -> None:
        super().__init__()
        self.both = _product(gate, up)

    def forward(self, states: Tensor) -> Tensor:
        return kernels().gated(self.both(states))


class KernelLayers:
    """Fused layers [variants, layers] that are alike, which one call of the kernels runs."""

    def __init__(self, variants: Sequence[Sequence[FusedLayer]]) -> None:
        self._variants, self._first, self.count = variants, variants[0][0], len(variants[0])
        structs = [layer.struct for layers in variants for layer in layers]
        self._structs = (LayerStruct * len(structs))(*structs)

    def fits(self, hidden: Tensor, paged: Attend, rotary: Any) -> bool:
        """Return whether the attention ``paged`` reads all tokens of the step by the kernels, in the layers' dtype."""
        same = hidden.dtype == paged.pool.shape.dtype == self._first.joint.panels.dtype
        return same and rotary is not None and paged.read_by_kernels(hidden.shape[1]) is not None

    def part(self, layers: slice) -> KernelLayers:
        """Return some of the layers."""
        if layers.indices(self.count) == (0, self.count, 1):
            return self
        return KernelLayers([variant[layers] for variant in self._variants])

    def run(
        self, hidden: Tensor, paged: Attend, rotary: tuple[Tensor, Tensor], variant_of: Tensor | None = None
    ) -> Tensor:
        """Run ``hidden`` [1, tokens, hidden] through the layers -> the same shape; ``variant_of``, int64 [tokens], says
        to which variant a token belongs."""
        first, states = self._first, hidden[0].clone(memory_format=torch.contiguous_format)
        scratch = first.joint.in_features + first.joint.out_features + first.out.in_features + first.down.in_features
        kernels().run_layers(
            self._structs,
            variant_of,
            states,
            tuple(half[0].contiguous() for half in rotary),
            paged_struct(paged.pool.rows, *paged.read_by_kernels(len(states))),
            scratch,
            first.before_attention.variance_epsilon,
            first.attention.scaling,
            len(self._variants),
        )
        return states[None]


def join(variants: Sequence[Sequence[nn.Module]]) -> tuple[int, KernelLayers | None]:
    """Return the number of layers of all ``variants``, from the first on, that one call of the kernels runs, and what
    calls them.

    These are fused and alike, and have the same weights in all variants.
    """
    kind, count = getattr(variants[0][0], "kind", None), 0
    for layers in zip(*variants, strict=True):
        alike = kind is not None and all(type(layer) is FusedLayer and layer.kind == kind for layer in layers)
        if not alike or any(layer.weights != layers[0].weights for layer in layers[1:]):
            break
        count += 1
    return count, KernelLayers([layers[:count] for layers in variants]) if count else None


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
    """Fuse one decoder layer as it arrives, and leave the stock one as it was; one that cannot be fused is packed in
    place."""
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
    """Return whether :func:`fuse_layer` makes a :class:`FusedLayer` of ``layer``, and leaves that as it was."""
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
    """Return ``states`` through ``norm``, a root-mean-square norm of Llama's kind, by the kernels."""
    return kernels().rms_norm(states.contiguous(), norm.weight, norm.variance_epsilon)


def _copied(norm: nn.Module) -> nn.Module:
    """``norm`` with memory of its own: where a whole layer lies in one buffer, a part of it would keep all of it."""
    copied_norm = copy.copy(norm)
    copied_norm._parameters = {"weight": nn.Parameter(norm.weight.detach().clone(), requires_grad=False)}
    return copied_norm


def packed(linear: nn.Linear) -> NativeLinear | PackedLinear:
    """``linear``, one that :func:`packs` says yes to, with its weight in the layout that is multiplied fastest here."""
    return NativeLinear([linear]) if multiplies(linear) else PackedLinear(linear)


def _product(*linears: nn.Linear | Linear8) -> NativeLinear | PackedLinear | Linear8:
    """One layer whose outputs are those of ``linears``, one after the other."""
    if isinstance(linears[0], Linear8):
        return Linear8.joined(linears)
    if all(map(multiplies, linears)):
        return NativeLinear(linears)
    if len(linears) == 1:
        return PackedLinear(linears[0])
    weight = torch.cat([linear.weight for linear in linears])
    joint = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    biases = [linear.bias for linear in linears]
    joint.bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
    return PackedLinear(joint)
