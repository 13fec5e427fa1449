"""The sizes of a drafter small enough to be computed by hand."""

from eaglet.eagle3 import Eagle3Config

SMALL = Eagle3Config(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=20,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=64,
    layer_ids=(2, 4, 5),
)
