# What the fusible operations do to a tensor of the caller's under no_grad. With a build of this tree:
# python requires_grad.py
import torch
import transformer_engine.pytorch.ops as te_ops

model = te_ops.Sequential(te_ops.MakeExtraOutput())
leaf = torch.ones(4, 8, requires_grad=True)
with torch.no_grad():
    model(leaf)
print("a leaf requires gradients:", leaf.requires_grad)

other = leaf.detach().requires_grad_() * 1
try:
    with torch.no_grad():
        model(other)
    print("a tensor that is no leaf requires gradients:", other.requires_grad)
except RuntimeError as error:
    print("a tensor that is no leaf:", error)
