"""A small Llama of Hugging Face transformers, trained on one long sequence whose tokens are spread over ranks.

    torchrun --nproc-per-node 2 examples/context_parallel_llama.py                 # 256k tokens on 2 GPUs
    torchrun --nproc-per-node 2 examples/context_parallel_llama.py --device cpu    # a tiny model, in seconds

Each rank has all weights and its share of the tokens; only attention needs the tokens of other ranks.
Needs transformers: pip install '.[demo]'
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from onepass import distributed

VOCABULARY = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="tokens of all ranks; default: 262144 on GPUs, 500 on a CPU")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--layout", choices=("contiguous", "head_tail", "balanced"), help="default: the plan's choice")
    parser.add_argument("--engine", choices=("heads", "keys"), help="default: the plan's choice")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    options = {"device_id": device} if on_gpu else {}
    if "RANK" not in os.environ:  # without torchrun there is one rank
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **options)

    # the same seed on all ranks: equal weights, and every rank can make the whole sequence
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024 if on_gpu else 64,
        intermediate_size=2816 if on_gpu else 128,
        num_hidden_layers=8 if on_gpu else 2,
        num_attention_heads=8 if on_gpu else 4,
        num_key_value_heads=4 if on_gpu else 2,
    )
    num_tokens = args.tokens or (2**18 if on_gpu else 500)
    model = LlamaForCausalLM(config).to(device)
    tokens = torch.randint(VOCABULARY, (1, -(-num_tokens // 2))).repeat(1, 2)[:, :num_tokens].to(device)

    # one plan serves all layers and all steps
    plan = distributed.plan(
        num_tokens,
        num_heads_q=config.num_attention_heads,
        num_heads_kv=config.num_key_value_heads,
        head_dim=config.head_dim,
        causal=True,
        layout=args.layout,
        engine=args.engine,
    )

    def attention_over_ranks(module, query, key, value, attention_mask, scaling=None, **kwargs):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return distributed.attention(q, k, v, plan, softmax_scale=scaling), None

    # no mask function is registered under this name, so transformers makes no mask: the plan is causal by itself
    AttentionInterface.register("onepass_over_ranks", attention_over_ranks)
    model.set_attn_implementation("onepass_over_ranks")
    if on_gpu:  # the backward computes each layer again, so that only one layer's activations are in memory at a time
        model.gradient_checkpointing_enable()
        model.train()

    # labels are shifted before they are dealt out: a token's successor may belong to another rank
    labels = torch.cat((tokens[:, 1:], tokens.new_full((1, 1), -100)), 1)
    own_tokens, own_labels = plan.shard(tokens, 1), plan.shard(labels, 1)
    positions = plan.positions(device)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    if plan.rank == 0:
        print(plan.describe(), flush=True)
    for step in range(args.steps):
        dist.barrier()
        start = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
            logits = model(own_tokens, position_ids=positions, use_cache=False).logits
        # this rank's share of the mean over all tokens; the shares and their gradients add up over ranks
        loss = cross_entropy(logits[0].float(), own_labels[0], reduction="sum") / (num_tokens - 1)
        loss.backward()
        total = loss.detach()
        for t in (total, *(p.grad for p in model.parameters())):
            dist.all_reduce(t)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB a rank" if on_gpu else ""
        if plan.rank == 0:
            print(f"step {step}: loss {float(total):.6f}, {num_tokens / seconds:.0f} tokens/s{memory}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
