"""A model of a few kilobytes, from which tests derive theirs with `dataclasses.replace`."""

from minisgl.model_config.config import ModelConfig

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    max_position=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=True,
    checkpoint_dtype="float32",
    eos_token_ids=(2,),
    bos_token_id=None,
)
