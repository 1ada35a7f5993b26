"""What PyTorch's operations do with the memory of their arguments: a view, perhaps a copy, or a change in place."""

# fmt: off
VIEWS = frozenset({
    "adjoint", "alias", "as_strided", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "broadcast_to",
    "chunk", "detach", "diagonal", "dsplit", "expand", "expand_as", "hsplit", "imag", "moveaxis", "movedim", "narrow",
    "permute", "positive", "ravel", "real", "requires_grad_", "select", "split", "split_with_sizes", "squeeze",
    "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk",
    "unsafe_split", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "vsplit",
})
STRIDED = frozenset({
    "adjoint", "broadcast_to", "expand", "expand_as", "moveaxis", "movedim", "permute", "swapaxes", "swapdims", "t",
    "transpose",
})
"""Views that are not contiguous, as a rule."""
SEVERAL = frozenset({
    "broadcast_tensors", "chunk", "dsplit", "hsplit", "split", "split_with_sizes", "tensor_split", "unbind",
    "unsafe_chunk", "unsafe_split", "vsplit",
})
"""Operations that return a tuple of views."""
COPIES_IF_NEEDED = frozenset({
    "as_tensor", "asarray", "bfloat16", "bool", "cpu", "cuda", "double", "float", "half", "int", "long", "to", "type",
    "type_as",
})
NUMBERS = frozenset({
    "dim", "element_size", "get_device", "is_contiguous", "item", "ndimension", "nelement", "numel", "size", "stride",
    "tolist",
})
"""Methods of a tensor that return Python numbers."""
# fmt: on

COPIES_IF_STRIDED = frozenset({"contiguous", "flatten", "reshape", "reshape_as"})
VIEW_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})

_NO_CHANGE = frozenset({"detach_", "rename_", "requires_grad_", "share_memory_"})
"""Methods that are named like operations in place, and leave the content."""


def changes_in_place(name: str) -> bool:
    """Whether the name of a method or function is that of an operation in place (`add_`, `relu_`)."""
    return name.endswith("_") and not name.startswith("_") and not name.endswith("__") and name not in _NO_CHANGE


INPLACE_ARGUMENT = {
    "alpha_dropout": 3,
    "celu": 2,
    "dropout": 3,
    "dropout1d": 3,
    "dropout2d": 3,
    "dropout3d": 3,
    "elu": 2,
    "feature_alpha_dropout": 3,
    "hardsigmoid": 1,
    "hardswish": 1,
    "hardtanh": 3,
    "leaky_relu": 2,
    "mish": 1,
    "relu": 1,
    "relu6": 1,
    "rrelu": 4,
    "selu": 1,
    "silu": 1,
    "threshold": 3,
}
"""Functions of `torch.nn.functional` with an argument `inplace`, and its position."""
