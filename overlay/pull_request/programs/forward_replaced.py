# How often a step with checkpointing runs a layer's forward: twice where the layer is checkpointed, else once.
# On the CPU: python forward_replaced.py
import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, hidden_states):
        return self.linear(hidden_states).tanh()


def another(self, hidden_states):
    return self.linear(hidden_states).sin()


def non_reentrant(func, *args):
    return checkpoint(func, *args, use_reentrant=False)


def of_the_layer(func, *args):
    assert isinstance(func.func.__self__, Layer)
    return checkpoint(func, *args, use_reentrant=False)


def runs(replace=lambda layer: None, function=non_reentrant):
    layer, counted = Layer().train(), []
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = function
    layer.linear.register_forward_pre_hook(lambda *_: counted.append(1))
    replace(layer)
    try:
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    except AttributeError as error:
        return error
    return len(counted)


print("as it is:", runs())
print("layer.forward = f:", runs(lambda layer: setattr(layer, "forward", another.__get__(layer))))
print("a checkpoint function that reads func.func.__self__:", runs(function=of_the_layer))
print("Layer.forward = f:", runs(lambda layer: setattr(Layer, "forward", another)))
