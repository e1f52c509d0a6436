"""The description of a model, independent of the file format it was read from.

Promise: frozen and complete. Layers, loader and memory budget are built from it alone.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from minisgl.model_config.kv_groups import KVGroup, KVShape, StateShape, group_layers
from minisgl.model_config.quantization import Quantization

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_CACHE = "fp8"
"""The value of --kv-dtype for keys and values of e4m3."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled for contexts longer than the original training length."""

    kind: str
    """One of "linear", "llama3", "yarn", "longrope", "proportional" (others are refused by name)."""
    factor: float
    original_max_position: int = 8192
    """llama3, yarn and longrope: original context length, in tokens."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
    beta_fast: float = 32.0
    """yarn only: frequencies with more turns than this over the original context stay unscaled."""
    beta_slow: float = 1.0
    """yarn only: frequencies with fewer turns than this are divided by the whole factor."""
    truncate: bool = True
    """yarn only: the bounds of the ramp between the two are rounded to whole frequency indices."""
    attention_factor: float = 1.0
    """yarn and longrope: factor on cosines and sines."""
    short_factors: tuple[float, ...] = ()
    """longrope only: divisor of each frequency if no context exceeds the original length."""
    long_factors: tuple[float, ...] = ()
    """longrope only: divisor of each frequency if contexts exceed the original length."""
    rotated_share: float = 1.0
    """proportional only: share of the frequencies, highest first, that rotate; the others are 0."""


class QueryScaling(NamedTuple):
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / length)) (Ministral 3)."""

    beta: float
    length: int


class ExpertStorage(Enum):
    """How a checkpoint has the matrices of the experts."""

    EACH = "gate, up and down of each expert"
    STACKED = "gate_up [E, 2F, M] and down [E, M, F] of all"
    GPT_OSS = "transposed, rows of gate and up taking turns, with biases"
    MXFP4 = "the same in blocks of 4-bit numbers, not transposed"


class Activation(Enum):
    """What an expert makes of its gate and up projections."""

    SILU = "silu(gate) * up"
    GELU = "gelu_tanh(gate) * up"
    CLAMPED = "g * sigmoid(alpha * g) * (u + 1), with gate and up clamped to a limit"


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that replaces the MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of one expert."""
    renormalize: bool
    """The weights of a token's experts are scaled to sum to 1; else they are their scores."""
    shared_intermediate_size: int = 0
    """Width of an MLP that every token goes through beside its experts; 0 = there is none."""
    shared_gate: bool = True
    """The shared MLP is weighted by the sigmoid of a linear layer (Qwen2-MoE); else it is added as it is."""
    sigmoid_scores: bool = False
    """Experts are scored by the sigmoids of the router's logits, not by their softmax (DeepSeek's router)."""
    choice_bias: bool = False
    """The checkpoint has a number for each expert that is added to its score for the choice alone."""
    num_groups: int = 1
    """Groups of experts of which a token chooses `kept_groups` first, by the sum of their two best scores."""
    kept_groups: int = 1
    weight_factor: float = 1.0
    """Factor on the weights of a token's experts."""
    activation: Activation = Activation.SILU
    alpha: float = 1.0
    """`Activation.CLAMPED` only."""
    limit: float = 0.0
    """`Activation.CLAMPED` only."""
    storage: ExpertStorage = ExpertStorage.EACH
    router_name: str = "gate"
    """The router's name within the mixture in the checkpoint."""
    router_bias: bool = False
    beside_mlp: bool = False
    """Every layer has an MLP of width `ModelConfig.intermediate_size` beside its experts (Gemma 4)."""
    router_scale: bool = False
    """The router has its own norm of the residual stream, whose weight the checkpoint has times sqrt(M)."""
    expert_scales: bool = False
    """The checkpoint has a factor on the weight of each expert."""
    router_in_float32: bool = False
    """The router's logits are computed and kept in float32."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with an MLP of width `ModelConfig.intermediate_size` instead of experts."""
    module_name: str = "mlp"
    """The mixture's name within a layer of the checkpoint."""
    gate_up_down_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The names of an expert's matrices in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only model, read from `config.json` and `generation_config.json`."""

    architecture: str
    """Hugging Face class name, for example "LlamaForCausalLM"."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    """Longest context that the model supports, in tokens."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool = False
    """The q, k and v projections have biases (Qwen2, and other families with `attention_bias`)."""
    o_bias: bool = False
    """The output projection has a bias (families with `attention_bias`)."""
    qk_norm: bool = False
    """Each head of q and k is normalised before the rotation (Qwen3, Gemma 3)."""
    qk_norm_of_all_heads: bool = False
    """All heads of q together, and all of k, are normalised before the rotation (OLMo 2)."""
    windows: tuple[int, ...] = ()
    """Window of each layer in tokens, the new one included; 0 = no window. Empty = no layer has a window."""
    cache_shapes: tuple[KVShape | StateShape, ...] = ()
    """What each layer keeps of a row: keys and values, or a state. Empty = every layer keeps `num_kv_heads`
    keys and values of `head_dim`."""
    kv_sources: tuple[int, ...] = ()
    """The layer whose keys and values each layer reads; empty = each layer reads its own."""
    projects_by_key_head: bool = False
    """The projections of linear attention have the rows of each key head together (Qwen3-Next)."""
    attention_gate: bool = False
    """Each head's query is followed by a gate, whose sigmoid multiplies the head's output (Qwen3.5)."""
    experts: ExpertsConfig | None = None
    local_rope_layers: frozenset[int] = frozenset()
    """Layers that use `local_rope_theta` without scaling (those of Gemma 3 and OLMo 3 with a window)."""
    local_rope_theta: float = 10000.0
    no_rope_layers: frozenset[int] = frozenset()
    """Layers that rotate nothing (SmolLM3, EXAONE 4)."""
    rotary_dim: int | None = None
    """The first elements of a head that are rotated; None = all (GLM-4 rotates half)."""
    rope_interleaved: bool = False
    """Elements 2i and 2i + 1 are rotated together, not i and i + half of all (GLM-4, Ernie 4.5)."""
    query_scaling: QueryScaling | None = None
    mtp_layers: int = 0
    """Layers behind the last that a checkpoint has for multi-token prediction, which are not loaded."""
    layers_with_keys_as_values: frozenset[int] = frozenset()
    """Layers without a projection of v, whose values are the keys before their norm (Gemma 4)."""
    global_head_dim: int | None = None
    """Head dim of the layers that are not in `local_rope_layers`; None = `head_dim` (Gemma 4)."""
    wide_mlp_layers: frozenset[int] = frozenset()
    """Layers whose MLP is twice as wide (Gemma 4)."""
    layer_input_width: int = 0
    """Width of what each layer gets of a token beside the stream; 0 = nothing (Gemma 4 E2B and E4B)."""
    layer_input_vocab: int = 0
    residual_scale: float | None = None
    """Factor on what attention and MLP add to the residual stream (Granite)."""
    logits_divisor: float | None = None
    """(Granite.)"""
    attention_scale: float | None = None
    """Factor on attention scores; None = 1 / sqrt(head_dim)."""
    embedding_scale: float | None = None
    """Factor on embeddings, rounded to their dtype (Gemma, Granite)."""
    attention_softcap: float | None = None
    """Attention scores become softcap * tanh(scores / softcap) (Gemma 2)."""
    attention_sinks: bool = False
    """Each head has a score of the checkpoint's that takes its share of the softmax and has no value
    (gpt-oss)."""
    logit_softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap), in float32 (Gemma 2)."""
    norm_weights_minus_one: bool = False
    """The checkpoint stores the weights of all norms minus 1 (Gemma)."""
    checkpoint_prefix: str = ""
    """Prefix of the text model's tensor names in multimodal checkpoints, whose other parts are not loaded
    (Gemma 3, Mistral Small 3)."""
    quantization: Quantization | None = None
    """How linear layers are quantized; None = no layer is."""
    cache_scale_names: tuple[str, str] | None = None
    """The checkpoint's names of an FP8 cache's scales in each layer's "self_attn": the keys' and the values'.
    None = they are 1."""
    checkpoint_dtype: str
    """"float32", "bfloat16" or "float16": the dtype of the stored weights."""
    eos_token_ids: tuple[int, ...]
    """All end-of-sequence ids, of generation_config.json and of config.json."""
    bos_token_id: int | None

    @property
    def logits_dtype(self) -> str | None:
        """The dtype that a soft cap gives the logits; None = the dtype of the model's weights."""
        return None if self.logit_softcap is None else "float32"

    @property
    def layer_shapes(self) -> tuple[KVShape | StateShape, ...]:
        """What each layer keeps: `cache_shapes`, or the heads that all layers have."""
        return self.cache_shapes or (KVShape(self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers by how their cache is kept, most often one group."""
        return group_layers(self.layer_shapes, self.windows, self.kv_sources, self.max_position)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The index in `kv_groups` of each layer's group; 0 for layers with a state."""
        members = [group.layers for group in self.kv_groups if not group.states]
        groups = {layer: index for index, layers in enumerate(members) for layer in layers}
        return tuple(groups.get(layer, 0) for layer in range(self.num_layers))

    @property
    def kv_elements_per_token(self) -> int:
        """K and V elements of one token over all layers."""
        return sum(group.elements_per_token for group in self.kv_groups)

    @property
    def has_states(self) -> bool:
        """Some layers keep a state of each row instead of keys and values."""
        return any(isinstance(shape, StateShape) for shape in self.cache_shapes)

    @property
    def layer_weights_per_token(self) -> int:
        """Weights per layer that a token is multiplied by: attention's, and the MLP's or its experts'."""
        heads = self.num_heads + self.num_kv_heads + (self.num_heads / 2 if self.attention_gate else 0)
        attention = round(2 * self.hidden_size * self.head_dim * heads)
        width = self.intermediate_size
        if self.experts is not None:
            width = self.experts.experts_per_token * self.experts.intermediate_size
            width += self.experts.shared_intermediate_size
            width += self.intermediate_size if self.experts.beside_mlp else 0
        return attention + 3 * self.hidden_size * width

    @property
    def mlp_elements_per_token(self) -> int:
        """Elements of a token's widest MLP activation; with experts, their outputs are included."""
        if self.experts is None:
            return self.intermediate_size
        each = self.experts.intermediate_size + self.hidden_size
        shared = self.experts.shared_intermediate_size
        return max(self.intermediate_size, self.experts.experts_per_token * each + shared)
