"""A Hugging Face model with every attention layer run by onepass: a tiny Llama with random weights.

Needs transformers: pip install '.[demo]'
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from onepass.integrations.transformers import register

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).to(device, dtype).eval()
tokens = torch.randint(256, (2, 50), device=device)

model.set_attn_implementation("eager")
expected = model(tokens).logits

# call this once per process; every model then knows the name: from_pretrained(..., attn_implementation=name)
name = register()
model.set_attn_implementation(name)
output = model(tokens, labels=tokens)
output.loss.backward()  # training works as well

bounds = (1e-4, 1e-5) if dtype == torch.float32 else (5e-2, 5e-2)
torch.testing.assert_close(output.logits, expected, rtol=bounds[0], atol=bounds[1])
difference = float((output.logits - expected).detach().abs().max())
loss = float(output.loss.detach())
print(f"{device}: attention {name!r}: logits within {difference:.1e} of eager attention, loss {loss:.3f}")
