"""A text model of transformers that is as small as experiments allow, and has two layers to tell apart."""

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 97,
}
"""What its configuration is given."""
