# Two forwards before a backward, with FSDP2 and reentrant activation checkpointing, against a model with neither.
# One process, on the CPU: python fsdp2_gradients.py
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def gradients(sharded):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).double().train()
    if sharded:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    losses = []
    for _ in range(2):
        ids = torch.randint(0, 97, (2, 16))
        losses.append(model(input_ids=ids, labels=ids).loss)
    torch.stack(losses).sum().backward()
    found = (parameter.grad for parameter in model.parameters())
    return torch.cat([(grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten() for grad in found])


torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
expected = gradients(sharded=False)
error = (gradients(sharded=True) - expected).norm() / expected.norm()
print(f"relative error of the gradients: {error:.3f}")
torch.distributed.destroy_process_group()
