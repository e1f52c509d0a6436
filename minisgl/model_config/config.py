"""What a model is, whatever file says so.

Promise: frozen, and complete: layers, loader and memory budget are made from it alone.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was first trained on."""

    kind: str
    """One of "linear", "llama3", "yarn", "longrope", "proportional" (others are refused by name)."""
    factor: float
    original_max_position: int = 8192
    """llama3, yarn and longrope: context length before stretching, in tokens."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
    beta_fast: float = 32.0
    """yarn only: frequencies with more turns than this over the original context are kept."""
    beta_slow: float = 1.0
    """yarn only: frequencies with fewer turns than this are stretched by the whole factor."""
    truncate: bool = True
    """yarn only: the bounds of the blend between the two lie on whole frequencies."""
    attention_factor: float = 1.0
    """yarn and longrope: what cosines and sines are multiplied by."""
    short_factors: tuple[float, ...] = ()
    """longrope only: what each frequency is divided by where no context is longer than the original."""
    long_factors: tuple[float, ...] = ()
    """longrope only: the same where some are."""
    rotated_share: float = 1.0
    """proportional only: the part of the frequencies, highest first, that rotate at all."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that stands in place of the MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of one expert."""
    renormalize: bool
    """The weights of a token's experts sum to 1; otherwise they are their share of all experts' softmax."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have an MLP of `ModelConfig.intermediate_size` instead."""
    module_name: str = "mlp"
    """What the checkpoint calls the mixture in a layer."""
    gate_up_down_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """What the checkpoint calls the matrices of an expert."""


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
    """Longest context the model was made for, in tokens."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool = False
    """The q, k and v projections have biases (Qwen2; others where `attention_bias` says so)."""
    o_bias: bool = False
    """The output projection has a bias (where `attention_bias` says so)."""
    qk_norm: bool = False
    """Each head of q and k is normalised before the rotation (Qwen3, Gemma 3)."""
    windows: tuple[int, ...] = ()
    """Tokens that each layer sees, the new one included; 0 = all of them. Empty = every layer sees all."""
    experts: ExpertsConfig | None = None
    local_rope_layers: frozenset[int] = frozenset()
    """Layers that rotate by `local_rope_theta`, unscaled, instead (Gemma 3's with a window)."""
    local_rope_theta: float = 10000.0
    attention_scale: float | None = None
    """What attention scores are multiplied by; None = 1 / sqrt(head_dim)."""
    embedding_scale: float | None = None
    """What embeddings are multiplied by, rounded to their dtype (Gemma)."""
    logit_softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""
    norms_less_one: bool = False
    """The checkpoint holds the weights of all norms less 1 (Gemma)."""
    checkpoint_prefix: str = ""
    """What stands before the tensors' names in the checkpoint, where it has other parts, too, that are not
    loaded (Gemma 3 and Mistral Small 3 with eyes)."""
    checkpoint_dtype: str
    """"float32", "bfloat16" or "float16": what the weights are stored in."""
    eos_token_ids: tuple[int, ...]
    """All of them: generation_config's list joined with config's."""
    bos_token_id: int | None

    @property
    def kv_elements_per_token(self) -> int:
        """K and V elements of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def layer_weights_per_token(self) -> int:
        """Weights that a token is multiplied by in a layer: attention's, and the MLP's or its experts'."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        width = self.intermediate_size
        if self.experts is not None:
            width = self.experts.experts_per_token * self.experts.intermediate_size
        return attention + 3 * self.hidden_size * width

    @property
    def mlp_elements_per_token(self) -> int:
        """Elements between the two halves of the widest MLP of one token, and its experts' outputs."""
        if self.experts is None:
            return self.intermediate_size
        each = self.experts.intermediate_size + self.hidden_size
        return max(self.intermediate_size, self.experts.experts_per_token * each)
