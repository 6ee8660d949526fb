"""Train a byte-level Llama on real text twice, with torch's SDPA and with onepass, and compare the losses step by step.

    python examples/train_on_text.py                    # 300 steps of 30M parameters on a GPU, a tiny model on a CPU
    python examples/train_on_text.py --plot losses.png

The text is Python's own library and the licenses on this machine: no download. Both runs start from the same weights
and see the same batches. The exit status is 1 if the two losses of a step differ by more than 0.05, or the two last
losses by more than 1 %.

Needs transformers: pip install '.[demo]'
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from onepass.integrations.transformers import register

MOST_BYTES = 20_000_000
LICENSES = Path("/usr/share/common-licenses")
STEP_BOUND, END_BOUND = 0.05, 0.01


def read_text() -> torch.Tensor:
    """The bytes of the library's modules and of licenses, in the order of their paths."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [*sorted(library.glob("*.py")), *sorted(library.glob("[a-z]*/*.py"))]
    paths += sorted(LICENSES.glob("*")) if LICENSES.is_dir() else []
    found = bytearray()
    for path in paths:
        if path.is_file() and "site-packages" not in path.parts and len(found) < MOST_BYTES:
            found += path.read_bytes()
    return torch.frombuffer(found, dtype=torch.uint8)


def make_model(is_small: bool, attention: str, device: str) -> LlamaForCausalLM:
    width, layers, heads, kv_heads = (64, 2, 4, 2) if is_small else (512, 10, 8, 4)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(device)


def train(
    model: LlamaForCausalLM, text: torch.Tensor, steps: int, batch: int, seqlen: int
) -> tuple[list[float], float]:
    """The loss of each step, and tokens a second after the first steps."""
    device = model.device
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses, started, warm_steps = [], 0.0, min(5, steps - 1)
    for step in range(steps):
        if step == warm_steps:
            if losses:
                losses[-1].item()  # waits for the device
            started = time.perf_counter()
        starts = torch.randint(len(text) - seqlen, (batch,), generator=generator)
        tokens = torch.stack([text[start : start + seqlen] for start in starts.tolist()]).long().to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    values = [float(loss) for loss in losses]  # waits for the device
    return values, (steps - warm_steps) * batch * seqlen / (time.perf_counter() - started)


def draw(path: str, losses: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(values) + 1), values, style, label=name, linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy of the next byte, nats")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=None, help="default: 300, on a CPU 60")
    parser.add_argument("--plot", default=None, metavar="PNG", help="draw the losses (needs matplotlib)")
    arguments = parser.parse_args()
    is_small = arguments.device == "cpu"
    steps = arguments.steps or (60 if is_small else 300)
    batch, seqlen = (4, 128) if is_small else (16, 2048)
    text = read_text()
    losses: dict[str, list[float]] = {}
    for name in ("sdpa", register()):
        model = make_model(is_small, name, arguments.device)
        losses[name], speed = train(model, text, steps, batch, seqlen)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        print(
            f"{name:8s} {millions:.1f}M parameters, {steps} steps of {batch} x {seqlen} of {len(text) / 1e6:.1f} MB: "
            f"loss {losses[name][0]:.3f} to {losses[name][-1]:.3f}, {speed:,.0f} tokens/s"
        )
    sdpa, onepass = losses.values()
    largest = max(abs(a - b) for a, b in zip(sdpa, onepass, strict=True))
    apart = abs(onepass[-1] / sdpa[-1] - 1)
    print(f"losses of a step differ by {largest:.1e} at most, the last ones by {apart:.2%}")
    if arguments.plot:
        draw(arguments.plot, losses)
    if largest > STEP_BOUND or apart > END_BOUND:
        raise SystemExit(f"expected at most {STEP_BOUND} and {END_BOUND}")


if __name__ == "__main__":
    main()
